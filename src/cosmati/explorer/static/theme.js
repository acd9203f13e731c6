"use strict";
// Before anything is drawn: the theme that was asked for by the address, or chosen before.
(() => {
  const asked = new URLSearchParams(location.search).get("theme") || localStorage.getItem("theme");
  if (asked === "light" || asked === "dark") document.documentElement.dataset.theme = asked;
})();

// Parts of a page that are fetched when they are looked at; here, for this script is there before all others.
async function askServer(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address} says ${answer.status}`);
  return answer.json();
}

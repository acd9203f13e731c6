// Command sumdb checks trees and proofs with golang.org/x/mod/sumdb, which is other people's code.
//
// It reads a JSON object a line and answers with one: {"error": ""} or what is wrong, and of a log the SHA-256 of the
// entries that the pin covers, each behind its length in two bytes.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type request struct {
	What       string   `json:"what"` // log, proof or consistency
	Vkey       string   `json:"vkey"`
	Directory  string   `json:"directory"`
	Pinned     string   `json:"pinned"` // a signed note; empty for none
	Checkpoint string   `json:"checkpoint"`
	Index      int64    `json:"index"`
	Entry      []byte   `json:"entry"`
	Path       [][]byte `json:"path"`
}

type answer struct {
	Error  string `json:"error"`
	Digest string `json:"digest"`
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		out.Encode(check(lines.Bytes()))
	}
}

func check(line []byte) (told answer) {
	defer func() {
		if found := recover(); found != nil {
			told = answer{Error: fmt.Sprint("panic: ", found)}
		}
	}()
	var asked request
	err := json.Unmarshal(line, &asked)
	if err == nil {
		switch asked.What {
		case "log":
			told.Digest, err = checkLog(asked)
		case "proof":
			err = checkProof(asked)
		case "consistency":
			err = checkConsistency(asked)
		default:
			err = errors.New("unknown question")
		}
	}
	if err != nil {
		told.Error = "refused: " + err.Error()
	}
	return told
}

// open verifies a signed note and reads its first three lines: origin, size, root.
func open(text, vkey string) (tree tlog.Tree, err error) {
	verifier, err := note.NewVerifier(vkey)
	if err != nil {
		return tree, err
	}
	opened, err := note.Open([]byte(text), note.VerifierList(verifier))
	if err != nil {
		return tree, err
	}
	lines := strings.Split(opened.Text, "\n")
	if len(lines) < 4 || lines[0] != verifier.Name() {
		return tree, errors.New("the note is no checkpoint of this log")
	}
	if tree.N, err = strconv.ParseInt(lines[1], 10, 64); err != nil {
		return tree, err
	}
	tree.Hash, err = tlog.ParseHash(lines[2])
	return tree, err
}

func hashes(path [][]byte) (found []tlog.Hash, err error) {
	for _, one := range path {
		var hash tlog.Hash
		if copy(hash[:], one) != tlog.HashSize || len(one) != tlog.HashSize {
			return nil, errors.New("a hash has another size")
		}
		found = append(found, hash)
	}
	return found, nil
}

func checkProof(asked request) error {
	tree, err := open(asked.Checkpoint, asked.Vkey)
	if err != nil {
		return err
	}
	path, err := hashes(asked.Path)
	if err != nil {
		return err
	}
	return tlog.CheckRecord(path, tree.N, tree.Hash, asked.Index, tlog.RecordHash(asked.Entry))
}

func checkConsistency(asked request) error {
	was, err := open(asked.Pinned, asked.Vkey)
	if err != nil {
		return err
	}
	now, err := open(asked.Checkpoint, asked.Vkey)
	if err != nil {
		return err
	}
	path, err := hashes(asked.Path)
	if err != nil {
		return err
	}
	return tlog.CheckTree(path, now.N, now.Hash, was.N, was.Hash)
}

// tiles reads the files of C2SP tlog-tiles, whose names lack the height that sumdb's have.
type tiles struct{ directory string }

func (t tiles) Height() int { return 8 }

func (t tiles) SaveTiles([]tlog.Tile, [][]byte) {}

func (t tiles) ReadTiles(wanted []tlog.Tile) (found [][]byte, err error) {
	for _, tile := range wanted {
		data, err := t.read(tile, "")
		if err != nil {
			return nil, err
		}
		found = append(found, data[:min(len(data), tile.W*tlog.HashSize)])
	}
	return found, nil
}

// read reads a tile or a bundle; where the partial one is gone the full one holds it, as tlog-tiles says.
func (t tiles) read(tile tlog.Tile, level string) ([]byte, error) {
	if level == "" {
		level = strconv.Itoa(tile.L)
	}
	for _, width := range []int{tile.W, 256} {
		tile.W = width
		name := strings.TrimPrefix(tile.Path(), fmt.Sprintf("tile/8/%d/", tile.L))
		data, err := os.ReadFile(filepath.Join(t.directory, "tile", level, name))
		if err == nil || width == 256 {
			return data, err
		}
	}
	return nil, nil
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

func (t tiles) entries(size int64) (found [][]byte, err error) {
	for index := int64(0); index*256 < size; index++ {
		tile := tlog.Tile{H: 8, L: 0, N: index, W: 256}
		if size-index*256 < 256 {
			tile.W = int(size - index*256)
		}
		data, err := t.read(tile, "entries")
		if err != nil {
			return nil, err
		}
		for number := 0; number < tile.W; number++ {
			if len(data) < 2 || len(data) < 2+int(binary.BigEndian.Uint16(data)) {
				return nil, errors.New("a bundle is cut short")
			}
			end := 2 + int(binary.BigEndian.Uint16(data))
			found, data = append(found, data[2:end]), data[end:]
		}
	}
	return found, nil
}

func checkLog(asked request) (string, error) {
	text, err := os.ReadFile(filepath.Join(asked.Directory, "checkpoint"))
	if err != nil {
		return "", err
	}
	tree, err := open(string(text), asked.Vkey)
	if err != nil {
		return "", err
	}
	covered := tree.N
	files := tiles{asked.Directory}
	reader := tlog.TileHashReader(tree, files)
	if asked.Pinned != "" {
		was, err := open(asked.Pinned, asked.Vkey)
		if err != nil {
			return "", err
		}
		covered = was.N
		if was.N > tree.N {
			return "", errors.New("the log was cut back")
		}
		proof, err := tlog.ProveTree(tree.N, was.N, reader)
		if err != nil {
			return "", err
		}
		if err = tlog.CheckTree(proof, tree.N, tree.Hash, was.N, was.Hash); err != nil {
			return "", err
		}
	}
	entries, err := files.entries(tree.N)
	if err != nil {
		return "", err
	}
	indexes := make([]int64, len(entries))
	for number := range entries {
		indexes[number] = tlog.StoredHashIndex(0, int64(number))
	}
	leaves, err := reader.ReadHashes(indexes)
	if err != nil {
		return "", err
	}
	digest := sha256.New()
	for number, entry := range entries {
		if tlog.RecordHash(entry) != leaves[number] {
			return "", fmt.Errorf("entry %d isn't that of its leaf", number)
		}
		if int64(number) < covered {
			binary.Write(digest, binary.BigEndian, uint16(len(entry)))
			digest.Write(entry)
		}
	}
	return hex.EncodeToString(digest.Sum(nil)), nil
}

"""Jobs that survive their machines: a queue, supervisors, and the engines that carry attempts out."""

// SPDX-License-Identifier: Apache-2.0

package options

import "fmt"

// Nearest returns the known word that differs from unknown by the fewest changes of a letter (insert, drop, replace, swap two), if
// these are at most a third of the longer word's letters; "": no word is that near.
func Nearest(unknown string, known []string) string {
	best, found := "", -1
	for _, k := range known {
		if n := distance(unknown, k); n <= max(len(unknown), len(k))/3 && (found < 0 || n < found) {
			best, found = k, n
		}
	}
	return best
}

// NearestHint returns ", did you mean ...?" to be appended to an error text, or "" if no known word is near.
func NearestHint(unknown string, known []string) string {
	if k := Nearest(unknown, known); k != "" {
		return fmt.Sprintf(", did you mean %q?", k)
	}
	return ""
}

// distance returns the number of changes between two words: Levenshtein's distance in bytes, with a swap of two neighbours as one
// change.
func distance(a, b string) int {
	before, above, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, above, row = above, row, before
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(above[j+1]+1, row[j]+1, above[j]+cost)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}

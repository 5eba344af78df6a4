// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// Each line of code in equivalent.txt must be in its file with the same text. Otherwise its
// mutants count as survivors again.
func TestEquivalentLinesAreThere(t *testing.T) {
	list, err := os.ReadFile("equivalent.txt")
	if err != nil {
		t.Fatal(err)
	}
	head := regexp.MustCompile(`(?m)^(\S+\.go) (\S+): (.*)$`)
	found := head.FindAllStringSubmatch(string(list), -1)
	if len(found) == 0 {
		t.Fatal("no line")
	}
	for _, l := range found {
		code, err := os.ReadFile("../../../" + l[1])
		if err != nil {
			t.Error(err)
		} else if !strings.Contains(string(code), l[3]+"\n") {
			t.Errorf("%s has no line %q", l[1], l[3])
		}
	}
}

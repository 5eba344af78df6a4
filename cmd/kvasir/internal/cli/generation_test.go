// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"reflect"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// Every value that --client-generation takes names a generation, and every
// generation has a value.
func TestClientGeneration(t *testing.T) {
	field, _ := reflect.TypeFor[serverCmd]().FieldByName("Client")
	var all lmcache.Generations
	for value := range strings.SplitSeq(field.Tag.Get("enum"), ",") {
		g, err := (&serverCmd{Client: value}).generations()
		if err != nil || (g == 0) != (value == "auto") || all&g != 0 {
			t.Errorf("%s: %v, %v", value, g, err)
		}
		all |= g
	}
	if all != lmcache.AllGenerations {
		t.Errorf("only %v can be forced", all)
	}
	if _, err := (&serverCmd{Client: "0.4.5"}).generations(); err == nil {
		t.Error("0.4.5 is taken")
	}
}

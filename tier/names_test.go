// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// The objects of a model that has two layouts with chunks of equal length have no names in LMCache's layout, and those of its revisions and
// generations have none.
func TestMixedModelsHaveNoNames(t *testing.T) {
	n := tier.NewNames()
	models := map[string]bool{"org/m": true, "org/m~r1": true, "org/m~r1~g2": true, "org/m2": false, "m": false}
	keys := map[string]kv.Key{}
	for model := range models {
		k := kv.Key{Namespace: kv.NamespaceOf(model, "", "f"), Rank: 1}
		keys[model] = k
		n.Add(k.Namespace, model, nil)
		if name, _ := n.Of(k.Namespace); name.Mixed {
			t.Errorf("%s is mixed before Mix", model)
		}
	}
	n.Mix("org/m")
	for model, mixed := range models {
		name, ok := n.Of(keys[model].Namespace)
		if !ok || name.Model != model || name.Mixed != mixed || name.Digested().Mixed != mixed {
			t.Errorf("%s: %+v", model, name)
		}
		if _, ok := name.LMCache(keys[model]); ok == mixed {
			t.Errorf("%s: has a name: %v", model, ok)
		}
		if err := n.Unnamed(keys[model]); !errors.Is(err, tier.ErrName) || strings.Contains(err.Error(), "several layouts") != mixed {
			t.Errorf("%s: %v", model, err)
		}
	}
	n.Each(func(_ kv.Namespace, name tier.Name) {
		if name.Mixed != models[name.Model] {
			t.Errorf("Each: %+v", name)
		}
	})
	(*tier.Names)(nil).Mix("m") // remembers nothing
	for i := range 1<<16 + 1 {
		n.Mix(fmt.Sprint(i))
	}
	if name, _ := n.Of(keys["m"].Namespace); !name.Mixed {
		t.Error("at the limit a model is not mixed: it may be one that was not remembered")
	}
}

// A restarted server knows the mixed models from its note. However many there were, none of them has names afterwards.
func TestMixedModelsOutliveARestart(t *testing.T) {
	const models = 1500
	n, next := tier.NewNames(), tier.NewNames()
	for i := range models {
		n.Mix(fmt.Sprintf("m%04d", i))
	}
	for _, model := range n.MixedModels() {
		next.Mix(model)
	}
	for i := range models {
		model := fmt.Sprintf("m%04d", i)
		ns := kv.NamespaceOf(model, "", "f")
		next.Add(ns, model, nil)
		if name, _ := next.Of(ns); !name.Mixed {
			t.Fatalf("%s has a name after the restart", model)
		}
	}
}

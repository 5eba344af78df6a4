// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/kv"
)

// maxNames bounds the namespaces in Names; Add says what happens beyond it.
const maxNames = 1 << 16

// Name has the model, the salt and the other parts of which a kv.Namespace is the digest. Tiers whose layout other programs share name
// objects by them.
type Name struct {
	Model, Salt string
	Revision    string // of the model's weights, if the operator names one
	Layout      string // for objects that model, rank, group and hash do not tell apart, such as rows of vLLM's tiered offloading; else ""
	Mixed       bool   // chunks of equal length may have different layouts, which LMCache's names do not tell apart; see Names.Mix
}

// Revised returns the name under which a model's chunks are stored: MODEL, or MODEL~REVISION.
func Revised(model, revision string) string {
	if revision == "" {
		return model
	}
	return model + "~" + revision
}

// Kept returns the name of the model in tiers that name objects by models: MODEL, then ~REVISION and ~LAYOUT if they are not empty.
func (n Name) Kept() string { return Revised(Revised(n.Model, n.Revision), n.Layout) }

// IsOf reports whether name, a model's name in a tier, stands for model, in any revision and generation.
func IsOf(name, model string) bool { return name == model || strings.HasPrefix(name, model+"~") }

// Names map each namespace to its model and salt, for tiers whose objects have names made
// of these. A nil *Names is empty and stays empty. Its methods are safe for
// concurrent use.
type Names struct {
	mu struct {
		sync.RWMutex
		of    map[kv.Namespace]Name
		mixed map[string]struct{} // models, without a revision or a generation
	}
	revisions map[string]string // by model; immutable once names are added
}

// SetRevisions sets the revisions of models: `of` has the revision by the model's name. Call it before the first Add.
func (n *Names) SetRevisions(of map[string]string) { n.revisions = of }

// NewNames returns empty Names.
func NewNames() *Names {
	n := &Names{}
	n.mu.of = make(map[kv.Namespace]Name)
	return n
}

// Add adds a namespace. If 65,536 are known (maxNames), it drops an arbitrary one of them. The user of a dropped namespace adds it again at
// its next use.
func (n *Names) Add(ns kv.Namespace, model string, salt []byte) { n.AddLayout(ns, model, salt, "") }

// AddLayout is Add for a namespace whose objects have a layout in their names.
func (n *Names) AddLayout(ns kv.Namespace, model string, salt []byte, layout string) {
	if n == nil {
		return
	}
	if _, ok := n.Of(ns); ok {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for other := range n.mu.of {
		if len(n.mu.of) < maxNames {
			break
		}
		delete(n.mu.of, other)
	}
	n.mu.of[ns] = Name{Model: model, Salt: string(salt), Revision: n.revisions[model], Layout: layout}
}

// Mix records that engines of a model, for example vLLM and SGLang, have chunks of equal length and different layouts. From then on the
// model's objects have no names in LMCache's layout, because these names do not tell layouts of chunks apart.
func (n *Names) Mix(model string) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.mixed == nil {
		n.mu.mixed = make(map[string]struct{})
	}
	if len(n.mu.mixed) < maxMixed {
		n.mu.mixed[model] = struct{}{}
	}
}

// maxMixed bounds the models of Mix. When there are as many, every model counts as mixed. A server's note of mixed models has room for as
// many, so that a restart loses none.
const maxMixed = 1024

// MixedModels returns the models of Mix, sorted. If there are maxMixed (1,024), every model counts as mixed, also in other Names to which
// these models are added.
func (n *Names) MixedModels() []string {
	if n == nil {
		return nil
	}
	n.mu.RLock()
	defer n.mu.RUnlock()
	return slices.Sorted(maps.Keys(n.mu.mixed))
}

// mixedLocked reports whether a model, or the model without its ~ parts (revision, generation), is mixed. At the limit all models are.
func (n *Names) mixedLocked(model string) bool {
	switch len(n.mu.mixed) {
	case 0:
		return false
	case maxMixed:
		return true
	}
	for {
		if _, mixed := n.mu.mixed[model]; mixed {
			return true
		}
		at := strings.LastIndexByte(model, '~')
		if at < 0 {
			return false
		}
		model = model[:at]
	}
}

// Namespaces returns the known namespaces of a model and a salt.
func (n *Names) Namespaces(model, salt string) (out []kv.Namespace) {
	if n == nil {
		return nil
	}
	n.mu.RLock()
	defer n.mu.RUnlock()
	for ns, of := range n.mu.of {
		if of.Model == model && of.Salt == salt {
			out = append(out, ns)
		}
	}
	return out
}

// Each calls f with each known namespace.
func (n *Names) Each(f func(kv.Namespace, Name)) {
	if n == nil {
		return
	}
	n.mu.RLock()
	of := maps.Clone(n.mu.of)
	for ns, name := range of {
		if name.Mixed = n.mixedLocked(name.Model); name.Mixed {
			of[ns] = name
		}
	}
	n.mu.RUnlock()
	for ns, name := range of {
		f(ns, name)
	}
}

// Of returns the name of a namespace. It reports false if the namespace is not known.
func (n *Names) Of(ns kv.Namespace) (Name, bool) {
	if n == nil {
		return Name{}, false
	}
	n.mu.RLock()
	defer n.mu.RUnlock()
	name, ok := n.mu.of[ns]
	name.Mixed = ok && n.mixedLocked(name.Model)
	return name, ok
}

// Unnamed returns why an object has no name in LMCache's layout: its model is not known yet, or the model's
// name is not allowed there (ErrName).
func (n *Names) Unnamed(k kv.Key) error {
	name, ok := n.Of(k.Namespace)
	if !ok {
		return fmt.Errorf("%w: its model is not known yet", ErrNotKept)
	}
	if name.Mixed {
		return fmt.Errorf("%w: %w: engines of model %.80q have several layouts, which LMCache's names do not tell apart; Kvasir's own layouts do", ErrNotKept, ErrName, name.Model)
	}
	return fmt.Errorf("%w: %w: model %.80q, of %d bytes, has a name that is too long or cannot be one in LMCache's layout", ErrNotKept, ErrName, name.Model, len(name.Model))
}

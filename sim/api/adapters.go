// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
)

// maxAdapters is the largest number of LoRA adapters that can be loaded at a time. A request to load another one gets an error.
const maxAdapters = 256

// adapters holds the names of the LoRA adapters that clients have loaded. They are only names: there is no model.
type adapters struct {
	mu struct {
		sync.Mutex
		loaded map[string]bool
	}
}

func (a *adapters) has(name string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.loaded[name]
}

func (a *adapters) names() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.mu.loaded))
}

// salt returns the salt for a request. For an adapter it is extended so that the adapter has a prefix cache of its own.
func (a *adapters) salt(model, salt string) string {
	if a.has(model) {
		return fmt.Sprintf("adapter %q %s", model, salt)
	}
	return salt
}

type adapterBody struct {
	Name string `json:"lora_name"`
	Path string `json:"lora_path"`
}

func (a *API) readAdapter(w http.ResponseWriter, r *http.Request) (b adapterBody, ok bool) {
	text, bad := a.text(w, r)
	if bad == nil && (json.Unmarshal(text, &b) != nil || b.Name == "" || len(b.Name) > maxID) {
		bad = badRequest("lora_name", "'lora_name' needs to be provided.")
	}
	if bad != nil {
		a.fail(w, bad)
	}
	return b, bad == nil
}

func (a *API) loadAdapter(w http.ResponseWriter, r *http.Request) {
	b, ok := a.readAdapter(w, r)
	if !ok {
		return
	}
	a.adapters.mu.Lock()
	defer a.adapters.mu.Unlock()
	switch {
	case b.Path == "":
		a.fail(w, badRequest("lora_path", "Both 'lora_name' and 'lora_path' must be provided."))
	case a.adapters.mu.loaded[b.Name] || b.Name == a.e.Model():
		a.fail(w, badRequest("lora_name", "The lora adapter '%.128s' has already been loaded.", b.Name))
	case len(a.adapters.mu.loaded) >= maxAdapters:
		a.fail(w, badRequest("lora_name", "%d adapters are loaded, there is no room for more", maxAdapters))
	default:
		if a.adapters.mu.loaded == nil {
			a.adapters.mu.loaded = make(map[string]bool)
		}
		a.adapters.mu.loaded[b.Name] = true
		fmt.Fprintf(w, "Success: LoRA adapter '%s' added successfully.", b.Name)
	}
}

func (a *API) unloadAdapter(w http.ResponseWriter, r *http.Request) {
	b, ok := a.readAdapter(w, r)
	if !ok {
		return
	}
	a.adapters.mu.Lock()
	defer a.adapters.mu.Unlock()
	if !a.adapters.mu.loaded[b.Name] {
		a.fail(w, &apiError{404, "NotFoundError", "lora_name", fmt.Sprintf("The lora adapter '%.128s' cannot be found.", b.Name)})
		return
	}
	delete(a.adapters.mu.loaded, b.Name)
	fmt.Fprintf(w, "Success: LoRA adapter '%s' removed successfully.", b.Name)
}

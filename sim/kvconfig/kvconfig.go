// SPDX-License-Identifier: Apache-2.0

// Package kvconfig reads an engine's configuration of KV transfers in vLLM's form: the JSON of --kv-transfer-config, and the
// environment.
//
// A configuration names one connector, or a MultiConnector with several. Unknown keys and values that are not possible are errors here,
// all reported together; vLLM ignores unknown keys in kv_connector_extra_config.
//
// Source: vllm/config/kv_transfer.py of 0.13.0 to 0.33.0; the connectors' own keys from
// MooncakeConnector and lmcache's LMCacheMPConnector of 0.5.6.
package kvconfig

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// The connectors that this package knows.
const (
	MooncakeConnector  = "MooncakeConnector"
	LMCacheMPConnector = "LMCacheMPConnector"
	multiConnector     = "MultiConnector"

	MooncakeStoreConnector = "MooncakeStoreConnector"
)

var connectors = []string{MooncakeConnector, MooncakeStoreConnector, LMCacheMPConnector, multiConnector}

// The values of kv_load_failure_policy.
const (
	Recompute = "recompute" // blocks that did not arrive are computed again
	Fail      = "fail"      // the request ends with an error; vLLM's default
)

// Config is one connector of an engine.
type Config struct {
	Connector         string
	Role              wire.Role
	EngineID          string // random if the configuration gives none
	LoadFailurePolicy string // Recompute or Fail

	extra map[string]json.RawMessage // kv_connector_extra_config
}

// Limits of a configuration. One that exceeds them is an error.
const (
	maxBytes      = 1 << 20 // of JSON
	maxConnectors = 16      // of a MultiConnector
)

// The keys of the JSON. Those in the second list concern devices, ports and processes of other connectors: they are accepted, but not
// checked and not used.
var (
	keys = []string{"kv_connector", "engine_id", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy"}
	moot = []string{
		"kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port",
		"kv_connector_module_path", "enable_permute_local_kv",
	}
)

// Parse parses the JSON of --kv-transfer-config, at most 1 MiB. It returns the one connector, or those of a MultiConnector in order.
// The error lists everything that is wrong.
func Parse(text []byte) ([]*Config, error) {
	if len(text) > maxBytes {
		return nil, fmt.Errorf("kv-transfer-config: it has %d bytes, at most %d are possible", len(text), maxBytes)
	}
	var p problems
	list := p.connectors(text, "", "")
	if err := p.err("kv-transfer-config"); err != nil {
		return nil, err
	}
	return list, nil
}

// problems collects texts that say what is wrong.
type problems []string

func (p *problems) add(format string, args ...any) { *p = append(*p, fmt.Sprintf(format, args...)) }

func (p problems) err(of string) error {
	if len(p) == 0 {
		return nil
	}
	return errors.New(of + ": " + strings.Join(p, "; "))
}

func (p *problems) connectors(text []byte, at, engineID string) []*Config {
	m := p.object(text, at)
	if m == nil {
		return nil
	}
	p.unknown(m, at, slices.Concat(keys, moot))
	c := &Config{extra: map[string]json.RawMessage{}, EngineID: engineID, LoadFailurePolicy: Fail}
	p.text(m, at, "kv_connector", &c.Connector)
	p.text(m, at, "engine_id", &c.EngineID)
	p.text(m, at, "kv_load_failure_policy", &c.LoadFailurePolicy)
	if c.EngineID == "" {
		c.EngineID = strings.ToLower(rand.Text())
	}
	switch {
	case c.Connector == "":
		p.add("%skv_connector is missing: one of %s", at, strings.Join(connectors, ", "))
	case !slices.Contains(connectors, c.Connector):
		p.add("%skv_connector %.64q is not supported%s: one of %s", at, c.Connector, options.NearestHint(c.Connector, connectors), strings.Join(connectors, ", "))
	}
	if c.LoadFailurePolicy != Fail && c.LoadFailurePolicy != Recompute {
		p.add("%skv_load_failure_policy %.64q: one of %s, %s", at, c.LoadFailurePolicy, Recompute, Fail)
	}
	role := ""
	p.text(m, at, "kv_role", &role)
	var err error
	if c.Role, err = wire.ParseRole(role); err != nil {
		p.add("%skv_role %.64q: one of kv_producer, kv_consumer, kv_both", at, role)
	}
	if raw, ok := m["kv_connector_extra_config"]; ok && string(raw) != "null" {
		if c.extra = p.object(raw, at+"kv_connector_extra_config: "); c.extra == nil {
			return nil
		}
	}
	if c.Connector != multiConnector {
		return []*Config{c}
	}
	if at != "" {
		p.add("%sa MultiConnector inside a MultiConnector is not possible", at)
		return nil
	}
	p.unknown(c.extra, "kv_connector_extra_config: ", []string{"connectors"})
	var children []json.RawMessage
	if err := json.Unmarshal(c.extra["connectors"], &children); err != nil || len(children) == 0 || len(children) > maxConnectors {
		p.add("kv_connector_extra_config: connectors must list 1 to %d configurations", maxConnectors)
		return nil
	}
	var list []*Config
	for i, child := range children {
		list = append(list, p.connectors(child, fmt.Sprintf("connectors[%d]: ", i), c.EngineID)...)
	}
	return list
}

// object parses one JSON object. After a problem it returns nil; `at` is where the object is, for the text of the problem.
func (p *problems) object(text []byte, at string) map[string]json.RawMessage {
	dec := json.NewDecoder(bytes.NewReader(text))
	var m map[string]json.RawMessage
	err := dec.Decode(&m)
	if err == nil && m == nil {
		err = errors.New("null is no JSON object")
	}
	if err == nil {
		if _, more := dec.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more than one JSON value")
		}
	}
	if err != nil {
		p.add("%s%v", at, err)
		return nil
	}
	return m
}

// unknown adds a problem for each key of m that is not in `known`. Its text begins with `at`, where m is.
func (p *problems) unknown(m map[string]json.RawMessage, at string, known []string) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		if !slices.Contains(known, key) {
			p.add("%sunknown key %.64q%s", at, key, options.NearestHint(key, known))
		}
	}
}

// text reads the string at key into *to. If the key is absent or null, *to stays unchanged. `at` is where m is, for the text of a problem.
func (p *problems) text(m map[string]json.RawMessage, at, key string, to *string) {
	if raw, ok := m[key]; ok && string(raw) != "null" && json.Unmarshal(raw, to) != nil {
		p.add("%s%s must be a text, not %.64s", at, key, raw)
	}
}

// flag reads the boolean at key into *to. If the key is absent or null, *to stays unchanged.
func (p *problems) flag(m map[string]json.RawMessage, key string, to *bool) {
	if raw, ok := m[key]; ok && string(raw) != "null" && json.Unmarshal(raw, to) != nil {
		p.add("%s must be true or false, not %.64s", key, raw)
	}
}

// number reads the number at key, which must lie between low and high, into *to. If the key is absent or null, *to stays unchanged.
func (p *problems) number(m map[string]json.RawMessage, key string, low, high float64, to *float64) {
	raw, ok := m[key]
	if !ok || string(raw) == "null" {
		return
	}
	var n float64
	if json.Unmarshal(raw, &n) != nil || n < low || n > high {
		p.add("%s must be a number from %g to %g, not %.64s", key, low, high, raw)
		return
	}
	*to = n
}

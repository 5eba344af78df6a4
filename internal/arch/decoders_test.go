// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"go/ast"
	"maps"
	"slices"
	"strings"
	"testing"
)

// fuzzed are the fuzz targets of each package that reads bytes of a network or a disk.
var fuzzed = map[string]string{
	"bench/report":                 "FuzzResult",
	"bench/workload":               "FuzzReadTrace FuzzReadShareGPT FuzzReadSessions",
	"cmd/kvasir/internal/settings": "FuzzSettings",
	"internal/auth":                "FuzzLines FuzzTenantLimits",
	"internal/http1":               "FuzzAnswer",
	"internal/openai":              "FuzzEnd FuzzReader FuzzScan FuzzSequences FuzzSetCached",
	"internal/otlp":                "FuzzParse",
	"internal/resp":                "FuzzConn",
	"internal/statefile":           "FuzzParse",
	"kv":                           "FuzzParseKey",
	"kv/coordinator":               "FuzzCases FuzzParseLayout FuzzSets",
	"kv/event":                     "FuzzDecode",
	"kv/paged":                     "FuzzPlan FuzzView",
	"lmcache":                      "FuzzDecodeKey FuzzEnvelope FuzzKVCache FuzzRead FuzzReply FuzzRequest FuzzSkipTokens",
	"lmcache/connector":            "FuzzEvents FuzzPaged FuzzScript",
	"lmcache/pickle":               "FuzzRead",
	"mooncake":                     "FuzzPlan",
	"mooncake/bootstrap":           "FuzzDirectory FuzzRegistration FuzzState",
	"mooncake/relay":               "FuzzTakeKeep FuzzTransferID",
	"mooncake/scheduler":           "FuzzScheduler",
	"mooncake/store":               "FuzzAnswers FuzzParseHiCacheKey",
	"mooncake/store/structpack":    "FuzzSkip",
	"mooncake/transfer":            "FuzzDataPort FuzzDescriptor FuzzFrame FuzzUnproven",
	"mooncake/v013":                "FuzzPlan",
	"mooncake/wire":                "FuzzParams FuzzPull FuzzPull013 FuzzReply",
	"proxy/keys":                   "FuzzOpen",
	"server":                       "FuzzAnswer FuzzConnection FuzzDriven FuzzPickledStore",
	"server/admin":                 "FuzzBody",
	"server/workers":               "FuzzNote",
	"sim/kvconfig":                 "FuzzParse",
	"store/pool":                   "FuzzOpen",
	"store/tenant":                 "FuzzDecode",
	"tier":                         "FuzzParseLMCache",
	"tier/disk":                    "FuzzDirectory FuzzIndex FuzzRecord",
	"tier/fs":                      "FuzzAttribute",
	"tier/generation":              "FuzzParse",
	"tier/keeper":                  "FuzzChunkOfName FuzzNames FuzzNotes",
	"tier/redis":                   "FuzzHeader FuzzServerAnswers",
	"tier/s3":                      "FuzzDocument FuzzLabel",
	"tier/seal":                    "FuzzHeader FuzzKeys",
	"tier/vllm":                    "FuzzMessages",
	"zmtp":                         "FuzzClients FuzzDecode FuzzReady FuzzSecure",
}

// unfuzzed maps packages that decode bytes and have no target to the reason.
var unfuzzed = map[string]string{
	"reads answers of servers that the user names, with encoding/json":          "bench bench/load cmd/kvasir/internal/bench cmd/kvasir/internal/cli cmd/kvasir/internal/doctor cmd/kvasir/internal/sim cmd/kvasir/internal/status cmd/kvasir/internal/tier cmd/kvasir/internal/verify tier/adapter tier/s3/aws sim/demo",
	"reads bounded bodies with encoding/json into fields that are checked":      "internal/httpserver internal/options server/lent proxy mooncake/transfer/bench",
	"reads bytes that it, or its own process, has written":                      "internal/peercred sim/cluster sim/engine sim/kvmem server/beginning store store/hold store/miss server/offload mooncake/store/connector",
	"gives what it reads to kv/event.Decode, which has a target":                "proxy/blocks server/events",
	"is a simulator's file, which its user writes":                              "sim/costmodel sim/tables sim/api sim/replay",
	"reads a flag, and replies that internal/resp has read, which has a target": "proxy/limits",
	"helps tests": "internal/testkit mooncake/store/storetest proxy/blocks/blockstest proxy/limits/limitstest tier/tiertest",
}

// decodes reports whether a call reads a form of bytes: Unmarshal, NewDecoder, a number of fixed length, a value of MessagePack, XML or hexadecimal text.
func decodes(call *ast.CallExpr) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	switch name := f.Sel.Name; {
	case name == "Unmarshal", name == "NewDecoder", name == "UnmarshalRead":
		return true
	case name == "Uint16", name == "Uint32", name == "Uint64":
		return len(call.Args) == 1
	case strings.HasPrefix(name, "Read") && strings.HasSuffix(name, "Bytes"):
		x, ok := f.X.(*ast.Ident)
		return ok && x.Name == "msgp"
	}
	return false
}

// parses reports whether a function has a parser's name and takes bytes or a text. It finds parsers of forms that no decoder above reads.
func parses(fn *ast.FuncDecl) bool {
	name := strings.ToLower(fn.Name.Name)
	if !strings.HasPrefix(name, "parse") && !strings.HasPrefix(name, "decode") {
		return false
	}
	return slices.ContainsFunc(fn.Type.Params.List, func(p *ast.Field) bool {
		if a, ok := p.Type.(*ast.ArrayType); ok {
			p = &ast.Field{Type: a.Elt}
		}
		id, ok := p.Type.(*ast.Ident)
		return ok && (id.Name == "byte" || id.Name == "string")
	})
}

// Each package that decodes bytes has fuzz targets, or a reason why not; both lists are true.
func TestEveryDecoderIsFuzzed(t *testing.T) {
	reasons := map[string]string{}
	for why, names := range unfuzzed {
		for _, name := range strings.Fields(names) {
			reasons[name] = why
		}
	}
	packages := read(t)
	for _, folder := range slices.Sorted(maps.Keys(packages)) {
		p := packages[folder]
		decoding := false
		for _, f := range p.files {
			ast.Inspect(f.tree, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				fn, declared := n.(*ast.FuncDecl)
				decoding = decoding || ok && decodes(call) || declared && parses(fn)
				return !decoding
			})
		}
		var targets []string
		for _, f := range p.tests {
			for _, d := range f.tree.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Fuzz") {
					targets = append(targets, fn.Name.Name)
				}
			}
		}
		slices.Sort(targets)
		want := strings.Fields(fuzzed[folder])
		slices.Sort(want)
		if !slices.Equal(targets, want) {
			t.Errorf("%s has the targets %q, the table fuzzed says %q", folder, targets, want)
		}
		outside := room(folder) == "interop" || room(folder) == "docs" || strings.HasPrefix(folder, "internal/tools")
		switch why, excused := reasons[folder]; {
		case decoding && len(targets) == 0 && !excused && !outside:
			t.Errorf("%s decodes bytes and has no fuzz target: write one, or say why not in the table unfuzzed", folder)
		case excused && len(targets) > 0:
			t.Errorf("%s has targets, and the table unfuzzed says that it %s", folder, why)
		}
		delete(reasons, folder)
	}
	for folder := range reasons {
		t.Errorf("the table unfuzzed has %s, which is no package", folder)
	}
	for folder := range fuzzed {
		if packages[folder] == nil {
			t.Errorf("the table fuzzed has %s, which is no package", folder)
		}
	}
}

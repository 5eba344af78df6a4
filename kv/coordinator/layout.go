// SPDX-License-Identifier: Apache-2.0

package coordinator

import (
	"bytes"
	"encoding/json"
	"io"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// maxLayoutBytes bounds the text of a layout that is parsed; a longer one is an error. Parsing takes memory in proportion to the text.
const maxLayoutBytes = 1 << 20

// jsonKinds are the kinds that have a name in the layout JSON.
var jsonKinds = []Kind{Full, MLA, Sink, SlidingWindow, SlidingWindowMLA, ChunkedLocal, Mamba, Cross}

const uniform = "uniform"

type layoutJSON struct {
	Groups    []groupJSON `json:"g"`
	Scheduler int         `json:"sched"`
	HashUnit  int         `json:"hash"`
	Eagle     flag        `json:"eagle"`
	Retention *int        `json:"ret,omitempty"`
	Partial   flag        `json:"partial,omitempty"`
}

type groupJSON struct {
	Kind   string     `json:"t"`
	Block  int        `json:"bs,omitempty"`
	Heads  int        `json:"heads,omitempty"`
	Window int        `json:"win,omitempty"`
	Extra  int        `json:"extra,omitempty"`
	Chunk  int        `json:"chunk,omitempty"`
	Mode   string     `json:"mode,omitempty"`
	Of     *groupJSON `json:"of,omitempty"`
	Eagle  flag       `json:"eagle,omitempty"`
}

// flag is 0, 1, false or true in JSON.
type flag bool

func (f *flag) UnmarshalJSON(b []byte) error {
	switch string(b) {
	case "0", "false", "null":
		*f = false
	case "1", "true":
		*f = true
	default:
		return layoutf("%.20q is neither 0 nor 1", b)
	}
	return nil
}

func (f flag) MarshalJSON() ([]byte, error) {
	if f {
		return []byte{'1'}, nil
	}
	return []byte{'0'}, nil
}

// UnmarshalJSON reads the group-layout JSON:
//
//	{"g": [{"t": "full", "bs": 16}, {"t": "swa", "bs": 16, "win": 1024}],
//	 "sched": 16, "hash": 16, "eagle": 0}
//
// Unknown keys and kinds are errors. New checks whether the sizes fit together.
func (l *Layout) UnmarshalJSON(b []byte) error {
	if len(b) > maxLayoutBytes {
		return layoutf("a layout of %d bytes is longer than %d", len(b), maxLayoutBytes)
	}
	var j layoutJSON
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&j); err != nil {
		return layoutf("layout: %v", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return layoutf("layout: text after the object")
	}
	if len(j.Groups) > maxGroups {
		return limitf("%d groups are more than %d", len(j.Groups), maxGroups)
	}
	out := Layout{Scheduler: j.Scheduler, HashUnit: j.HashUnit, Eagle: bool(j.Eagle), Partial: bool(j.Partial)}
	if j.Retention != nil {
		out.Retention, out.HasRetention = *j.Retention, true
	}
	for i := range j.Groups {
		g, err := j.Groups[i].group()
		if err != nil {
			return err
		}
		out.Groups = append(out.Groups, g)
	}
	*l = out
	return nil
}

func (j *groupJSON) group() (Group, error) {
	in := *j
	if j.Kind == uniform {
		if j.Of == nil {
			return Group{}, layoutf("layout: a uniform group without \"of\"")
		}
		if j.Of.Of != nil || j.Of.Block != 0 && j.Of.Block != j.Block || bool(j.Of.Eagle) {
			return Group{}, layoutf("layout: \"of\" has a kind and its numbers, nothing else")
		}
		in = *j.Of
		in.Block, in.Eagle = j.Block, j.Eagle
	} else if j.Of != nil {
		return Group{}, layoutf("layout: \"of\" belongs to a uniform group")
	}
	g := Group{
		Block: in.Block, Heads: in.Heads, Window: in.Window, Extra: in.Extra, Chunk: in.Chunk,
		Eagle: bool(in.Eagle), Uniform: j.Kind == uniform,
	}
	i := slices.IndexFunc(jsonKinds, func(k Kind) bool { return k.String() == in.Kind })
	if i < 0 {
		return Group{}, layoutf("layout: unknown kind %.40q", in.Kind)
	}
	g.Kind = jsonKinds[i]
	if in.Mode != "" {
		m := slices.Index(modeNames[:], in.Mode)
		if m < 0 {
			return Group{}, layoutf("layout: unknown Mamba mode %.40q", in.Mode)
		}
		g.Mode = MambaMode(m)
	}
	return g, nil
}

// MarshalJSON writes the group-layout JSON. Kinds without a name there are an
// error; a Variant is not written.
func (l Layout) MarshalJSON() ([]byte, error) {
	j := layoutJSON{
		Groups: []groupJSON{}, Scheduler: l.Scheduler, HashUnit: l.HashUnit,
		Eagle: flag(l.Eagle), Partial: flag(l.Partial),
	}
	if l.HasRetention {
		j.Retention = &l.Retention
	}
	for _, g := range l.Groups {
		if !slices.Contains(jsonKinds, g.Kind) {
			return nil, layoutf("layout: %v has no name in the layout JSON", g.Kind)
		}
		out := groupJSON{
			Kind: g.Kind.String(), Block: g.Block, Heads: g.Heads,
			Window: g.Window, Extra: g.Extra, Chunk: g.Chunk, Eagle: flag(g.Eagle),
		}
		if g.Mode != MambaAlign {
			out.Mode = g.Mode.String()
		}
		if g.Uniform {
			of := out
			of.Block, of.Eagle = 0, false
			out = groupJSON{Kind: uniform, Block: g.Block, Of: &of, Eagle: flag(g.Eagle)}
		}
		j.Groups = append(j.Groups, out)
	}
	return json.Marshal(j)
}

// ParseLayout reads a layout from words, as on a command line:
//
//	full,bs=16 swa,bs=16,win=1024 mamba,bs=32,mode=align eagle
//
// A word that begins with a kind is a group: the kind, then bs, heads, win,
// extra, chunk, mode, of (uniform) and eagle, separated by commas. Other words are hash=N,
// sched=N, ret=N, eagle and partial. The hash unit is by default the greatest
// common divisor of the blocks, the scheduler block their least common multiple.
// A text that begins with a brace is read as JSON.
func ParseLayout(text string) (Layout, error) {
	if len(text) > maxLayoutBytes {
		return Layout{}, layoutf("a layout of %d bytes is longer than %d", len(text), maxLayoutBytes)
	}
	if text = strings.TrimSpace(text); strings.HasPrefix(text, "{") {
		var l Layout
		return l, l.UnmarshalJSON([]byte(text))
	}
	var l Layout
	for word := range strings.FieldsSeq(text) {
		if err := l.addWord(word); err != nil {
			return Layout{}, err
		}
	}
	if len(l.Groups) == 0 {
		return Layout{}, layoutf("layout: no group; write for example full,bs=16 swa,bs=16,win=1024")
	}
	return l, l.fillSizes()
}

func (l *Layout) addWord(word string) error {
	name, value, hasValue := strings.Cut(word, "=")
	switch {
	case word == "eagle":
		l.Eagle = true
		return nil
	case word == "partial":
		l.Partial = true
		return nil
	case !hasValue || strings.Contains(name, ","):
		if len(l.Groups) == maxGroups {
			return limitf("more than %d groups", maxGroups)
		}
		g, err := parseGroup(word)
		l.Groups = append(l.Groups, g)
		return err
	}
	n, err := strconv.Atoi(value)
	if err != nil {
		return layoutf("layout: %.40q is not a number of tokens", word)
	}
	switch name {
	case "hash":
		l.HashUnit = n
	case "sched":
		l.Scheduler = n
	case "ret":
		l.Retention, l.HasRetention = n, true
	default:
		return layoutf("layout: unknown setting %.40q", name)
	}
	return nil
}

func parseGroup(word string) (Group, error) {
	kind, rest, _ := strings.Cut(word, ",")
	j := groupJSON{Kind: kind}
	if kind == uniform {
		j.Of = &groupJSON{}
	}
	in := &j // where the numbers go: for a uniform group, into its first layer's spec
	if j.Of != nil {
		in = j.Of
	}
	for part := range strings.SplitSeq(rest, ",") {
		name, value, _ := strings.Cut(part, "=")
		to := map[string]*int{
			"bs": &j.Block, "heads": &in.Heads, "win": &in.Window, "extra": &in.Extra, "chunk": &in.Chunk,
		}[name]
		switch {
		case part == "":
		case part == "eagle":
			j.Eagle = true
		case name == "mode":
			in.Mode = value
		case name == "of" && j.Of != nil:
			in.Kind = value
		case to == nil:
			return Group{}, layoutf("layout: unknown part %.40q in %.80q", part, word)
		default:
			n, err := strconv.Atoi(value)
			if err != nil {
				return Group{}, layoutf("layout: %.40q is not a number", part)
			}
			*to = n
		}
	}
	g, err := j.group()
	switch {
	case err != nil:
		return Group{}, err
	case g.Block == 0:
		return Group{}, layoutf("layout: %.80q lacks bs=, the tokens of a block", word)
	case g.Kind.isWindow() && g.Window == 0:
		return Group{}, layoutf("layout: %.80q lacks win=, the tokens of its window", word)
	case g.Kind == ChunkedLocal && g.Chunk == 0:
		return Group{}, layoutf("layout: %.80q lacks chunk=, the tokens of an attention chunk", word)
	}
	return g, nil
}

// fillSizes sets the hash unit and the scheduler block if the text gave none.
func (l *Layout) fillSizes() error {
	div, mul := 0, 1
	for _, g := range l.Groups {
		if g.Block <= 0 || g.Block > maxSize {
			return limitf("block_size (%d) must be between 1 and %d", g.Block, maxSize)
		}
		div = gcd(div, g.Block)
		if hi, lo := bits.Mul64(uint64(mul), uint64(g.Block/gcd(mul, g.Block))); hi != 0 || lo > maxSize {
			mul = maxSize + 1 // New refuses it
		} else {
			mul = int(lo)
		}
	}
	if l.HashUnit == 0 {
		l.HashUnit = div
	}
	if l.Scheduler == 0 {
		l.Scheduler = mul
	}
	return nil
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

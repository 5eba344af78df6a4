// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// AdviseCommand is kvasir advise. It says what to buy or to change for a higher hit rate.
type AdviseCommand struct {
	Window  string  `help:"Time to look at: 15m, 1h or 24h." default:"24h" enum:"15m,1h,24h"`
	Price   float64 `name:"gpu-hour-price" help:"Price of an hour of the GPUs that compute prompts, in any currency; 0: no money is shown." default:"0" placeholder:"PRICE"`
	Prefill float64 `name:"prefill-tokens-per-second" help:"Prompt tokens that these GPUs compute in a second." default:"10000"`
	askFlags
}

// Help returns the text that kvasir advise --help shows. It implements kong's detailed help.
func (AdviseCommand) Help() string {
	return `Says which part of the prompts was found, which part a memory without end would have found, and what comes nearer to it: more RAM,
a tier, equal salts, smaller chunks, a faster tier, prompts whose beginning does not change; with the prefill time that it saves, and money
with --gpu-hour-price. The rates of other amounts of memory are estimates, from small caches that the server runs beside its pool. Changing
beginnings are found in a sample of the prompts. docs/operate/sizing.md says how far to trust both. The first advice is the one that gains most.

Examples:
  kvasir advise
  kvasir advise --gpu-hour-price 2.5 --prefill-tokens-per-second 20000
  kvasir advise --url http://127.0.0.1:8081 --window 1h
  kvasir advise --json | jq '.advice[0]'`
}

// Advice is the answer of kvasir advise.
type Advice struct {
	Window  hitcurve.Window `json:"window"`
	Tokens  float64         `json:"asked_tokens"`
	Options []Option        `json:"advice"` // the option that gains most comes first
}

// Option is one thing to buy or to change.
type Option struct {
	Kind    string  `json:"kind"` // pool, tier, salt, chunk_size, slow_tier or beginning
	What    string  `json:"what"`
	Rate    float64 `json:"hit_rate"` // the hit rate with it
	Points  float64 `json:"points"`   // percentage points of the hit rate that it gains
	Most    bool    `json:"at_most"`  // the gain is an upper bound
	Seconds float64 `json:"prefill_seconds"`
	Money   float64 `json:"money,omitempty"`
	Lost    uint64  `json:"lost_tokens,omitempty"` // prompt tokens since the start that were not found, for the reason that the option removes
	Share   float64 `json:"lost_share,omitempty"`  // Lost as a share of all tokens asked for
}

// The limits that CheckCost checks. Within them, all figures of an Advice are finite numbers.
const (
	maxPrice                  = 1e9
	leastPrefill, mostPrefill = 0.001, 1e12
)

// CheckCost returns an error if a value is out of range. price is that of one hour of the GPUs, prefill how many prompt tokens they
// compute in a second.
func CheckCost(price, prefill float64) (err error) {
	if !(price >= 0 && price <= maxPrice) {
		err = fmt.Errorf("--gpu-hour-price %g is outside 0 to %g", price, maxPrice)
	}
	if !(prefill >= leastPrefill && prefill <= mostPrefill) {
		err = errors.Join(err, fmt.Errorf("--prefill-tokens-per-second %g is outside %g to %g", prefill, leastPrefill, mostPrefill))
	}
	return err
}

// leastPoints is how many percentage points an option must gain to be shown. The possible hit rate itself is known only to about one
// point.
const leastPoints = 2

// Run asks the server for its status and prints the advice.
func (c *AdviseCommand) Run(e *sim.Env) error {
	if err := CheckCost(c.Price, c.Prefill); err != nil {
		return sim.UsageErrorf("%v", err)
	}
	body, at, err := c.ask(e, http.MethodGet, "/status", nil)
	if err != nil {
		return err
	}
	var st admin.Status
	if err := json.Unmarshal(body, &st); err != nil || st.PID == 0 || st.ChunkTokens == 0 {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	place := map[string]int{"15m": 0, "1h": 1, "24h": 2}[c.Window]
	if len(st.HitCurves) <= place || len(st.HitCurves[place].Curve) != len(hitcurve.Factors) && (len(st.HitCurves[place].Curve) > 0 || st.HitCurves[place].Asked > 0) {
		return fmt.Errorf("%s has no hit_curves: the server is of an earlier release", at)
	}
	a := c.advise(&st, st.HitCurves[place])
	if c.JSON {
		return json.NewEncoder(e.Stdout).Encode(a)
	}
	return c.print(e.Stdout, &st, &a)
}

// advise returns the options for one window, the one that gains most first.
func (c *AdviseCommand) advise(st *admin.Status, w hitcurve.Window) Advice {
	a := Advice{Window: w, Tokens: float64(w.Tokens), Options: []Option{}}
	if w.Tokens == 0 { // a server of an earlier release does not count tokens
		a.Tokens = float64(w.Asked) * float64(st.ChunkTokens)
	}
	if w.Asked == 0 {
		c.addLost(&a, st)
		return a
	}
	c.addMemory(&a, st)
	c.addLost(&a, st)
	slices.SortStableFunc(a.Options, func(x, y Option) int { return cmp.Compare(y.Points, x.Points) })
	return a
}

// add adds an option if it gains enough. It computes what the gain saves.
func (c *AdviseCommand) add(a *Advice, o Option) {
	if o.Points < leastPoints {
		return
	}
	o.Seconds = o.Points / 100 * a.Tokens / c.Prefill
	o.Money = o.Seconds / 3600 * c.Price
	a.Options = append(a.Options, o)
}

// addMemory adds the smallest larger pool that gains at least 80 % of what the largest pool of the curve gains. If there is no tier, it
// also adds a tier for the difference in size.
func (c *AdviseCommand) addMemory(a *Advice, st *admin.Status) {
	w := &a.Window
	best := w.Curve[len(w.Curve)-1].Rate - w.Hit
	for _, p := range w.Curve {
		if gain := p.Rate - w.Hit; p.Bytes > st.Pool.TotalBytes && gain >= 0.8*best {
			more := kv.FormatBytes(p.Bytes - st.Pool.TotalBytes)
			c.add(a, Option{Kind: "pool", What: fmt.Sprintf("%s more RAM for the pool (--l1-size-gb)", more), Rate: p.Rate, Points: 100 * gain})
			if len(w.Tiers) == 0 { // 0.01 less, so that the pool comes first if both gain the same
				c.add(a, Option{Kind: "tier", What: fmt.Sprintf("a tier of %s below the pool (--disk), where RAM is too dear", more), Rate: p.LRU, Points: 100*(p.LRU-w.Hit) - 0.01})
			}
			return
		}
	}
}

// addLost adds the options against losses that more memory does not prevent. It knows them from the tokens that were lost for each
// reason since the start.
func (c *AdviseCommand) addLost(a *Advice, st *admin.Status) {
	l := &st.Lookup
	short := l.LostTokens[miss.Short.Label()]
	all := float64(l.AskedTokens + short)
	if all == 0 {
		return
	}
	lost := func(kind, what string, tokens uint64) {
		share := min(float64(tokens)/all, 1)
		gain := min(share, max(1-a.Window.Hit, 0)) // since the start more may have been lost than the window still lacks
		c.add(a, Option{Kind: kind, What: what, Rate: a.Window.Hit + gain, Points: 100 * gain, Most: true, Lost: tokens, Share: share})
	}
	of := func(reasons ...miss.Reason) (tokens uint64) {
		for _, why := range reasons {
			tokens += l.LostTokens[why.Label()]
		}
		return tokens
	}
	lost("salt", "one cache_salt for prompts that may share KV: they are there under another salt", of(miss.OtherSalt))
	lost("chunk_size", fmt.Sprintf("a --chunk-size below %d: prompts are shorter than a chunk", st.ChunkTokens), short)
	lost("slow_tier", "a faster tier, or a longer --l2-prefetch-load-timeout: it did not give in time what it has", of(miss.BelowSlow, miss.BelowSlower, miss.BelowFailed))
	b := &l.Beginnings
	lost("beginning", fmt.Sprintf("prompts that begin alike: move what changes at their beginning (a date, an id) behind what they share. %s tokens at most differ, the %s behind them are as in earlier prompts",
		Thousands(b.DifferTokens), Thousands(b.SameTokens)), b.LostTokens)
}

// unknownBeginnings says how many tokens were lost either to a changing beginning or for another reason, which is not known. The text
// is empty if they are few.
func unknownBeginnings(l *server.LookupStatus) string {
	n := l.Beginnings.UnknownTokens
	if n == 0 || n < l.AskedTokens/50 {
		return ""
	}
	return fmt.Sprintf("\nNot known: whether beginnings that change lost any of %s tokens. Engines of vLLM's tiered offloading send hashes of their prompts alone.\n", Thousands(n))
}

// print writes the advice in words.
func (c *AdviseCommand) print(w io.Writer, st *admin.Status, a *Advice) error {
	if a.Window.Asked == 0 && len(a.Options) == 0 && st.VLLM != nil && st.Lookup.Lookups > 0 {
		_, err := fmt.Fprintf(w, "No prompt of at least %d tokens was looked up with its tokens in the last %s. Nothing is estimated for vLLM's tiered offloading, which sends hashes alone: "+
			"kvasir status has its hit rate, and why hits ended.\n", st.ChunkTokens, c.Window)
		return err
	}
	if a.Window.Asked == 0 && len(a.Options) == 0 {
		_, err := fmt.Fprintf(w, "No prompt of at least %d tokens was looked up in the last %s: there is nothing to say yet.\n", st.ChunkTokens, c.Window)
		return err
	}
	if a.Window.Asked == 0 {
		fmt.Fprintf(w, "No prompt of at least %d tokens was looked up in the last %s. What follows is from the server's start on.\n", st.ChunkTokens, c.Window)
	} else if err := c.printWindow(w, st, a); err != nil {
		return err
	}
	if len(a.Options) == 0 {
		_, err := fmt.Fprintf(w, "\nNothing that could be bought or changed gains %d points or more.\n%s", leastPoints, unknownBeginnings(&st.Lookup))
		return err
	}
	fmt.Fprintf(w, "\nWhat gains most, at %s prompt tokens a second:\n", rateText(c.Prefill))
	for _, o := range a.Options {
		fmt.Fprintf(w, "- %s\n  %s\n", o.What, c.gain(&o))
	}
	_, err := io.WriteString(w, unknownBeginnings(&st.Lookup))
	return err
}

// printWindow writes which share of the tokens was found in the window, and which share other amounts of memory would have found.
func (c *AdviseCommand) printWindow(w io.Writer, st *admin.Status, a *Advice) error {
	win := &a.Window
	fmt.Fprintf(w, "Of %s tokens that were asked for in the last %s, hit %.1f %% of %.1f %% possible (from the pool %.1f %%).\n\n",
		Thousands(uint64(a.Tokens)), c.Window, 100*win.Hit, 100*win.Ceiling, 100*win.Pool)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "memory\thit rate\twith lru\t")
	for _, p := range win.Curve {
		mark := ""
		if p.Bytes == st.Pool.TotalBytes {
			mark = "  this pool"
		}
		fmt.Fprintf(t, "%s\t%.1f %%\t%.1f %%\t%s\n", kv.FormatBytes(p.Bytes), 100*p.Rate, 100*p.LRU, mark)
	}
	for _, p := range win.Tiers {
		fmt.Fprintf(t, "with tier %s\t%.1f %%\t\t\n", printable(p.Name), 100*p.Rate)
	}
	fmt.Fprintf(t, "without end\t%.1f %%\t\t\n", 100*win.Ceiling)
	return t.Flush()
}

// rateText writes a rate: below 10 with three digits, else as a whole number.
func rateText(v float64) string {
	if v < 10 {
		return strconv.FormatFloat(v, 'g', 3, 64)
	}
	return Thousands(uint64(v))
}

// gain says in words what an option saves.
func (c *AdviseCommand) gain(o *Option) string {
	var b strings.Builder
	if o.Most {
		b.WriteString("at most ")
	}
	fmt.Fprintf(&b, "+%.1f points: %.1f %%", o.Points, 100*o.Rate)
	if o.Seconds > 0 { // it is 0 if nothing was asked for in the window
		fmt.Fprintf(&b, ", %.0f s of prefill", o.Seconds)
		if c.Price > 0 {
			fmt.Fprintf(&b, ", %.2f of GPU time", o.Money)
		}
		fmt.Fprintf(&b, " in %s", c.Window)
	}
	if o.Lost > 0 {
		fmt.Fprintf(&b, "; lost since the start: %s tokens, %.1f %% of those that were asked for", Thousands(o.Lost), 100*o.Share)
	}
	return b.String()
}

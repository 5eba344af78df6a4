// SPDX-License-Identifier: Apache-2.0

package tables

import (
	_ "embed"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

//go:embed reference.csv
var reference string

// Length has the lengths of one request: prompt tokens, the limit of its output, and how many tokens it generated in each row of the
// original's table.
type Length struct {
	Prompt, Limit int
	Output        [2]int
}

// The totals of the original's table. Generate scales a workload to them.
const (
	prompts      = 100
	inputTokens  = 23260
	limitTokens  = 22061
	output1      = 21350
	output2      = 21881
	stopped1     = 8 // requests that stop before their limit
	stopped2     = 3
	longestLow   = 710 // the longest output lies between these, according to duration, TTFT and ITL of the table
	longestHigh  = 840
	maxListBytes = 1 << 20 // a longer list is ErrLengths
)

// Reference returns the fixed list of lengths, in the order of sending. It is drawn from the lengths of ShareGPT and scaled to the
// table's totals; it is not vLLM's own sample.
func Reference() []Length {
	list, err := ReadLengths(strings.NewReader(reference))
	if err != nil {
		panic("BUG: the reference list: " + err.Error())
	}
	return list
}

// ErrLengths means that a list of lengths cannot be parsed.
var ErrLengths = errors.New("tables: list of lengths")

// ReadLengths parses lines of prompt,limit,output or prompt,limit,output,output; the last is for the second row. It skips a first line
// of words. Errors name the line.
func ReadLengths(r io.Reader) ([]Length, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxListBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrLengths, err)
	}
	if len(text) > maxListBytes {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrLengths, maxListBytes)
	}
	var out []Length
	line := 0
	for l := range strings.Lines(string(text)) {
		line++
		fields := strings.Split(strings.TrimSpace(l), ",")
		if fields[0] == "" || line == 1 && fields[0] == "prompt" {
			continue
		}
		var n []int
		for _, f := range fields {
			v, err := strconv.Atoi(strings.TrimSpace(f))
			if err != nil || v < 1 || v > 1<<20 {
				return nil, fmt.Errorf("%w: line %d: %.32q is not a number of tokens, 1 to 2^20", ErrLengths, line, f)
			}
			n = append(n, v)
		}
		if len(n) != 3 && len(n) != 4 {
			return nil, fmt.Errorf("%w: line %d: %d numbers; prompt,limit,output are wanted", ErrLengths, line, len(n))
		}
		if slices.Max(n[2:]) > n[1] {
			return nil, fmt.Errorf("%w: line %d: an output beyond its limit of %d", ErrLengths, line, n[1])
		}
		out = append(out, Length{n[0], n[1], [2]int{n[2], n[len(n)-1]}})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: it has no line with lengths", ErrLengths)
	}
	return out, nil
}

// percents are the percentages of the quantiles below: lengths, in tokens of Qwen's tokenizer, of the 15,460 conversations of
// ShareGPT_V3 that vllm bench serve accepts. In 64 % of them a human has the first turn. The first and the last quantile are vLLM's
// limits, or beyond the last measured one.
var percents = []float64{0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100}

var quantiles = [2][2][]float64{
	{
		{4, 4, 7, 8, 12, 16, 21, 29, 43, 73, 136, 338, 569, 914, 1024},
		{4, 9, 26, 48, 102, 152, 204, 251, 297, 350, 425, 561, 693, 783, 1000},
	},
	{
		{4, 43, 122, 173, 239, 290, 334, 382, 441, 511, 604, 740, 772, 807, 1024},
		{4, 4, 5, 7, 10, 12, 16, 20, 27, 37, 55, 116, 284, 1030, 1400},
	},
}

const humanFirst = 0.64

func draw(rnd *rand.Rand, q []float64) int {
	u := rnd.Float64() * 100
	i := 1
	for u > percents[i] {
		i++
	}
	share := (u - percents[i-1]) / (percents[i] - percents[i-1])
	return int(math.Round(q[i-1] + share*(q[i]-q[i-1])))
}

// Generate draws a workload from the quantiles of ShareGPT's lengths, scaled to the totals of the table. With condition, the longest
// output has a length that agrees with the table.
func Generate(seed uint64, condition bool) []Length {
	rnd := rand.New(rand.NewPCG(seed, 5))
	for {
		list := make([]Length, 0, prompts)
		for len(list) < prompts {
			kind := 1
			if rnd.Float64() < humanFirst {
				kind = 0
			}
			p, o := draw(rnd, quantiles[kind][0]), draw(rnd, quantiles[kind][1])
			if p <= 1024 && p+o <= 2048 {
				list = append(list, Length{Prompt: p, Limit: o})
			}
		}
		scale(list, func(l *Length) *int { return &l.Prompt }, inputTokens, 1024)
		scale(list, func(l *Length) *int { return &l.Limit }, limitTokens, 1500)
		for i := range list {
			list[i].Output = [2]int{list[i].Limit, list[i].Limit}
		}
		stop(rnd, list, 0, stopped1, limitTokens-output1)
		stop(rnd, list, 1, stopped2, limitTokens-output2)
		longest := 0
		for _, l := range list {
			longest = max(longest, l.Output[0])
		}
		if !condition || longest >= longestLow && longest <= longestHigh {
			return list
		}
	}
}

// scale multiplies one length of all requests, the one that `of` returns a pointer to, by a factor, so that these lengths sum to total;
// none becomes less than 4 or more than `most` tokens.
func scale(list []Length, of func(*Length) *int, total, most int) {
	for range 64 {
		sum := 0
		for i := range list {
			sum += *of(&list[i])
		}
		if sum == total {
			return
		}
		factor := float64(total) / float64(sum)
		for i := range list {
			p := of(&list[i])
			*p = min(max(int(math.Round(float64(*p)*factor)), 4), most)
		}
		if math.Abs(factor-1) < 0.005 {
			break
		}
	}
	sum := 0
	for i := range list {
		sum += *of(&list[i])
	}
	for i := 0; sum != total; i = (i + 1) % len(list) { // what rounding left over
		p := of(&list[i])
		switch {
		case sum < total && *p < most && *p >= 20:
			*p++
			sum++
		case sum > total && *p > 20:
			*p--
			sum--
		}
	}
}

// stop makes n requests of a row end early, by `tokens` tokens in all, as if their sequence had ended.
func stop(rnd *rand.Rand, list []Length, row, n, tokens int) {
	order := rnd.Perm(len(list))
	room := 0
	var chosen []int
	for _, i := range order {
		if list[i].Limit < 20 || len(chosen) == n && room >= tokens {
			continue
		}
		chosen = append(chosen, i)
		room += list[i].Limit - 4
	}
	for k, i := range chosen {
		take := tokens * (list[i].Limit - 4) / room
		if k == len(chosen)-1 {
			take = min(tokens, list[i].Limit-4)
		}
		list[i].Output[row] -= take
		tokens -= take
		room -= list[i].Limit - 4
	}
}

// requests returns a list of lengths as a workload: all requests arrive at the same time, with the outputs of one row.
func requests(list []Length, row int) []workload.Request {
	out := make([]workload.Request, len(list))
	for i, l := range list {
		out[i] = workload.Request{Input: l.Prompt, Output: l.Output[row], Conversation: i}
	}
	return out
}

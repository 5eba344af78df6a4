package coordinator

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Case is one recorded situation of a vector file: a model, a prompt, and what a
// store holds of it.
type Case struct {
	ID     string
	Layout Layout
	Units  int     // hash units of the prompt
	Prompt int     // tokens of the prompt
	Stored [][]Run // by group: stored hash units, as recorded
}

// Vectors is a vector file, without what the original answered.
type Vectors struct {
	Release string  // of vLLM
	Dialect Dialect // of that release
	Cases   []Case
}

// ParseVectors reads a vector file. Cases whose layout the original refuses are
// among them; New says why.
func ParseVectors(data []byte) (*Vectors, error) {
	if len(data) > maxFileBytes {
		return nil, layoutf("a vector file of %d bytes is longer than %d", len(data), maxFileBytes)
	}
	var file struct {
		VLLM     string `json:"vllm"`
		Features struct {
			Concat bool `json:"concat_keys"`
			Lookup bool `json:"lookup_mask"`
		} `json:"features"`
		Cases []struct {
			ID     string  `json:"id"`
			Layout Layout  `json:"cfg"`
			Units  int     `json:"n"`
			Prompt int     `json:"prompt"`
			Stored [][]int `json:"ex"`
		} `json:"cases"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&file); err != nil {
		return nil, layoutf("vectors: %v", err)
	}
	v := &Vectors{Release: file.VLLM}
	if file.Features.Concat || !file.Features.Lookup {
		v.Dialect = Original
	}
	for i := range file.Cases {
		in := &file.Cases[i]
		c := Case{ID: in.ID, Layout: in.Layout, Units: in.Units, Prompt: in.Prompt}
		if c.Units < 0 || c.Prompt < 0 || c.Units > maxTokens || c.Prompt > maxTokens {
			return nil, layoutf("vectors: case %.40q has a length out of bounds", in.ID)
		}
		if len(in.Stored) > len(c.Layout.Groups) {
			return nil, layoutf("vectors: case %.40q stores more groups than it has", in.ID)
		}
		for _, flat := range in.Stored {
			runs, err := runsOf(flat)
			if err != nil {
				return nil, layoutf("vectors: case %.40q: %v", in.ID, err)
			}
			c.Stored = append(c.Stored, runs)
		}
		v.Cases = append(v.Cases, c)
	}
	return v, nil
}

// runsOf reads start, count, start, count …
func runsOf(flat []int) ([]Run, error) {
	if len(flat)%2 != 0 {
		return nil, fmt.Errorf("%d numbers make no pairs", len(flat))
	}
	var runs []Run
	for i := 0; i < len(flat); i += 2 {
		start, count := flat[i], flat[i+1]
		if start < 0 || count < 0 || start > maxTokens || count > maxTokens {
			return nil, fmt.Errorf("a stored run out of bounds")
		}
		runs = append(runs, Run{start, start + count})
	}
	return runs, nil
}

// Presence fills r, a set of c's groups, with what the case's store holds.
func (v *Case) Presence(r *Runs) {
	r.Reset()
	for g, runs := range v.Stored {
		for _, run := range runs {
			r.AddUnits(g, run.Start, run.End)
		}
	}
}

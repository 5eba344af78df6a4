// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// recordedCase is one recorded situation of a vector file: a model, a prompt, and what a
// store holds of it.
type recordedCase struct {
	ID     string
	Layout coordinator.Layout
	Units  int                 // hash units of the prompt
	Prompt int                 // tokens of the prompt
	Stored [][]coordinator.Run // by group: stored hash units, as recorded
}

// recordedFile is a vector file, without what the original answered.
type recordedFile struct {
	VLLM    string // version
	Release coordinator.Release
	Cases   []recordedCase
}

// parseVectors reads a vector file. It also returns cases whose layout the original refuses;
// for these New returns the reason.
func parseVectors(data []byte) (*recordedFile, error) {
	var file struct {
		VLLM     string `json:"vllm"`
		Features struct {
			Concat bool `json:"concat_keys"`
			Lookup bool `json:"lookup_mask"`
		} `json:"features"`
		Cases []struct {
			ID     string             `json:"id"`
			Layout coordinator.Layout `json:"cfg"`
			Units  int                `json:"n"`
			Prompt int                `json:"prompt"`
			Stored [][]int            `json:"ex"`
		} `json:"cases"`
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&file); err != nil {
		return nil, fmt.Errorf("vectors: %w", err)
	}
	v := &recordedFile{VLLM: file.VLLM, Release: coordinator.VLLM033}
	if file.Features.Concat || !file.Features.Lookup {
		v.Release = coordinator.VLLM023
	}
	for i := range file.Cases {
		in := &file.Cases[i]
		c := recordedCase{ID: in.ID, Layout: in.Layout, Units: in.Units, Prompt: in.Prompt}
		if c.Units < 0 || c.Prompt < 0 || c.Units > maxRecorded || c.Prompt > maxRecorded {
			return nil, fmt.Errorf("vectors: case %.40q has a length out of bounds", in.ID)
		}
		if len(in.Stored) > len(c.Layout.Groups) {
			return nil, fmt.Errorf("vectors: case %.40q stores more groups than it has", in.ID)
		}
		for _, flat := range in.Stored {
			runs, err := runsOf(flat)
			if err != nil {
				return nil, fmt.Errorf("vectors: case %.40q: %w", in.ID, err)
			}
			c.Stored = append(c.Stored, runs)
		}
		v.Cases = append(v.Cases, c)
	}
	return v, nil
}

// runsOf reads start, count, start, count …
func runsOf(flat []int) ([]coordinator.Run, error) {
	if len(flat)%2 != 0 {
		return nil, fmt.Errorf("%d numbers make no pairs", len(flat))
	}
	var runs []coordinator.Run
	for i := 0; i < len(flat); i += 2 {
		start, count := flat[i], flat[i+1]
		if start < 0 || count < 0 || start > maxRecorded || count > maxRecorded {
			return nil, errors.New("a stored run out of bounds")
		}
		runs = append(runs, coordinator.Run{Start: start, End: start + count})
	}
	return runs, nil
}

// maxRecorded bounds lengths in a vector file.
const maxRecorded = 1 << 48

// explain draws the case.
func (v *recordedCase) explain(w io.Writer, r coordinator.Release, ascii bool) error {
	stored := v.Stored
	if stored == nil {
		stored = [][]coordinator.Run{}
	}
	return coordinator.Explain(w, coordinator.Explanation{
		Layout: v.Layout, Options: coordinator.Options{Release: r}, Prompt: v.Prompt, Units: v.Units, Stored: stored, ASCII: ascii,
	})
}

// presence fills r, a set of c's groups, with the blocks of the case's store.
func (v *recordedCase) presence(r *coordinator.Runs) {
	r.Reset()
	for g, runs := range v.Stored {
		for _, run := range runs {
			r.AddUnits(g, run.Start, run.End)
		}
	}
}

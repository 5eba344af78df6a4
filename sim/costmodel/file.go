// SPDX-License-Identifier: Apache-2.0

package costmodel

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// maxFile is the largest file of a profile, in bytes. A larger one is ErrProfile.
const maxFile = 1 << 20

// Open returns the profile of that name, one of Names, or reads it from a file whose name ends with .json.
func Open(nameOrFile string) (*Profile, error) {
	if !strings.HasSuffix(nameOrFile, ".json") {
		return Get(nameOrFile)
	}
	f, err := os.Open(nameOrFile)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameOrFile, err)
	}
	return p, nil
}

// Read reads a profile as JSON. Constants that it does not name get the assumed values.
func Read(r io.Reader) (*Profile, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("%w: longer than %d bytes", ErrProfile, maxFile)
	}
	p := &Profile{TP: 1, BlockTokens: 16, TokenBudget: 2048, MaxSeqs: 256, MaxModel: 32768, Constants: assumed}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(p); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProfile, options.ExplainJSON(text, err))
	}
	return p, p.Validate()
}

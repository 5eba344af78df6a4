// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"compress/gzip"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"testing"
)

// vectorFiles holds folder/file.json.gz under testdata.
//
//go:embed testdata
var vectorFiles embed.FS

// ReadVector decodes one JSON vector file, named folder/file.json, into v. Vector says where the file is found. If the file cannot be
// decoded, the test fails.
func ReadVector(t testing.TB, name string, v any) {
	t.Helper()
	if err := json.Unmarshal(Vector(t, name), v); err != nil {
		t.Fatalf("decode vectors %s: %v", name, err)
	}
}

// Vector returns the content of a vector file, named folder/file.json.
//
// If KVASIR_VECTORS is set, the file is read from that folder, under its name or with .gz added, and a missing file skips the test.
// Otherwise the file comes from this package's testdata, or from testdata beside the test, and must exist. A file that cannot be read
// fails the test.
func Vector(t testing.TB, name string) []byte {
	t.Helper()
	r, err := openVector(name)
	if errors.Is(err, fs.ErrNotExist) && os.Getenv("KVASIR_VECTORS") != "" {
		t.Skipf("no %s in KVASIR_VECTORS", name)
	}
	if err != nil {
		t.Fatalf("open vectors: %v", err)
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read vectors %s: %v", name, err)
	}
	return data
}

func openVector(name string) (io.ReadCloser, error) {
	if dir := os.Getenv("KVASIR_VECTORS"); dir != "" {
		return openVectorIn(os.DirFS(dir), name)
	}
	r, err := openVectorIn(vectorFiles, path.Join("testdata", name))
	if errors.Is(err, fs.ErrNotExist) {
		return openVectorIn(os.DirFS("testdata"), path.Base(name))
	}
	return r, err
}

func openVectorIn(dir fs.FS, name string) (io.ReadCloser, error) {
	f, err := dir.Open(name)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	if f, err = dir.Open(name + ".gz"); err != nil {
		return nil, err
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return struct {
		io.Reader
		io.Closer
	}{z, f}, nil
}

// Hex is a byte string that JSON contains as hexadecimal digits.
type Hex []byte

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Hex) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

// Frames returns the byte strings as frames.
func Frames(list []Hex) [][]byte {
	out := make([][]byte, len(list))
	for i, h := range list {
		out[i] = h
	}
	return out
}

// Recording is one file of frames that a real LMCache client and server exchanged.
type Recording struct {
	Meta struct {
		ChunkTokens int `json:"chunk_size"`
	}
	Steps []struct {
		Step   string
		Frames []struct {
			Direction string // client_to_server or server_to_client
			Hex       []Hex  `json:"frames_hex"`
			Decoded   struct {
				Payloads []json.RawMessage
			}
		}
	}
}

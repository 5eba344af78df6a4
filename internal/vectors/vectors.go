// Package vectors reads golden vectors for tests: bytes and decisions recorded
// from the real peers.
package vectors

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Read decodes one JSON vector file into v. name is folder/file.json.
//
// With KVASIR_VECTORS set the file is read from that folder, and a missing file
// skips the test. Without it the file is testdata/<file>.json, or the same name
// with .gz, beside the test, and must be there. An unreadable file fails.
func Read(t testing.TB, name string, v any) {
	t.Helper()
	r, err := open(name)
	if errors.Is(err, fs.ErrNotExist) && os.Getenv("KVASIR_VECTORS") != "" {
		t.Skipf("no %s in KVASIR_VECTORS", name)
	}
	if err != nil {
		t.Fatalf("open vectors: %v", err)
	}
	defer r.Close()
	if err := json.NewDecoder(r).Decode(v); err != nil {
		t.Fatalf("read vectors %s: %v", name, err)
	}
}

func open(name string) (io.ReadCloser, error) {
	path := filepath.Join("testdata", filepath.Base(name))
	if dir := os.Getenv("KVASIR_VECTORS"); dir != "" {
		path = filepath.Join(dir, filepath.FromSlash(name))
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && !strings.HasSuffix(path, ".gz") {
		f, err = os.Open(path + ".gz")
	}
	if err != nil {
		return nil, err
	}
	if !strings.HasSuffix(f.Name(), ".gz") {
		return f, nil
	}
	z, err := gzip.NewReader(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{z, f}, nil
}

package settings

import (
	"strings"
	"testing"
)

// Whatever a file has, it is settings of known keys or an error of one line.
func FuzzSettings(f *testing.F) {
	for _, seed := range []string{"port: 1\n", "a: &x [1, 2]\nport: *x\n", "port: {}\n---\nport: 2\n", "- 1\n", "port: !!null\n", "<<: {port: 1}\n", "\x00", "\"a\\nb\": 1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		known := []string{"port", "host", "allow-host"}
		got, err := readSettings(strings.NewReader(text), "file", known)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Errorf("%q", err)
			}
			return
		}
		for key, s := range got {
			if key != "port" && key != "host" && key != "allow-host" || s.line < 1 {
				t.Errorf("%s: %+v", key, s)
			}
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"os"
	"testing"

	"github.com/kvasir-kv/kvasir/tier/fs"
)

// A write of an object that is there whole writes nothing, with padding and without. If its file has another length, it is written again.
func TestObjectThatIsThereIsNotWrittenAgain(t *testing.T) {
	for name, o := range map[string]fs.Options{"plain": {}, "padded": {Pad: true}} {
		o.Path = folder(t)
		d := open(t, o)
		put(t, d, 1, 10_000)
		file := func() os.FileInfo {
			t.Helper()
			i, err := os.Stat(pathOf(o.Path, 1))
			if err != nil {
				t.Fatal(err)
			}
			return i
		}
		first := file()
		put(t, d, 1, 10_000)
		if !os.SameFile(first, file()) {
			t.Errorf("%s: it is written again", name)
		}
		if err := os.Truncate(pathOf(o.Path, 1), 5000); err != nil {
			t.Fatal(err)
		}
		put(t, d, 1, 10_000)
		if now := file(); os.SameFile(first, now) || now.Size() != first.Size() {
			t.Errorf("%s: a file of 5,000 bytes stays, now of %d", name, now.Size())
		}
	}
}

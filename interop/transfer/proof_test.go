// SPDX-License-Identifier: Apache-2.0

package transfer_test

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// Beside a secret, the C++ engine works in the stock networks, as initiator and as target, and is refused elsewhere: nothing of its bytes
// arrives, and nothing is sent to it.
func TestStockEngineBesideASecret(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte(strings.Repeat("s", 32)+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for stock, works := range map[string]bool{"127.0.0.0/8": true, "10.0.0.0/8": false} {
			secrets, err := auth.OpenPeerSecrets(path, []netip.Prefix{netip.MustParsePrefix(stock)}, nil)
			if err != nil {
				t.Fatal(err)
			}
			e := startEngine(t, python, room)
			target, mem := listen(t, transfer.TargetOptions{Secrets: secrets})
			list, src := shape{4096, 64, true}.pieces(), pattern(room, 3)
			e.fill(3)
			rc := e.run("write", target.Name(), testBase, list)
			if works {
				settle(t, target, 64*4096)
				checkTarget(t, target, mem, src, list)
			}
			target.Table().Observe()
			if (rc == 0) != works || !works && (bytes.ContainsFunc(mem, func(r rune) bool { return r != 0 }) || secrets.Refused() == 0) {
				t.Errorf("engine %s, stock %s: its write returned %d, %d refused", e.Version, stock, rc, secrets.Refused())
			}
			c := transfer.New(transfer.Options{Secrets: secrets})
			before := e.hash([]piece{{0, 0, room}})
			err = c.Write(limited(t), e.Segment, []transfer.Entry{{Local: pattern(4096, 9), Remote: e.Base + 8192}})
			if works && err != nil || !works && (!errors.Is(err, transfer.ErrUnproven) || e.hash([]piece{{0, 0, room}}) != before) {
				t.Errorf("engine %s, stock %s: our write: %v", e.Version, stock, err)
			}
			if works && e.hash([]piece{{8192, 0, 4096}}) != hashOf(pattern(4096, 9)) {
				t.Errorf("engine %s: its memory differs", e.Version)
			}
			c.Close()
			e.kill()
		}
	})
}

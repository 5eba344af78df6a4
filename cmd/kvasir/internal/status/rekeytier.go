// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// maxRekeyLine is the longest line of the server's answer, in bytes; a longer one is an error.
const maxRekeyLine = 64 << 10

// RekeyTier makes a running server encrypt the objects of one of its tiers anew that an older key encrypted, and prints the progress.
// rate is how many bytes a second the server may rewrite; 0: the server's default.
func RekeyTier(e *sim.Env, url string, access AccessFlags, tier string, rate int64, asJSON bool) error {
	f := interfaceFlags{URL: url, AccessFlags: access}
	base, err := f.base()
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string]any{"tier": tier, "bytes_per_second": rate})
	if err != nil {
		return err
	}
	at := base + "/tiers/rekey"
	r, err := http.NewRequestWithContext(e.Ctx, http.MethodPost, at, strings.NewReader(string(body)))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	a, err := f.asker()
	if err != nil {
		return err
	}
	done := false
	err = a.stream(r, func(answer io.Reader) error {
		lines := bufio.NewScanner(answer)
		lines.Buffer(make([]byte, 0, 4096), maxRekeyLine)
		for lines.Scan() {
			var l struct {
				seal.RekeyStats
				Status, Error string
			}
			if err := json.Unmarshal(lines.Bytes(), &l); err != nil || l.Status == "" {
				return fmt.Errorf("%s is not answered by a kvasir server", at)
			}
			if asJSON {
				fmt.Fprintln(e.Stdout, lines.Text())
			} else {
				fmt.Fprintln(e.Stdout, rekeyText(&l.RekeyStats, l.Status == "running"))
			}
			switch l.Status {
			case "error":
				return errors.New(printable(l.Error))
			case "ok":
				done = true
				if l.Failed > 0 {
					return fmt.Errorf("%d objects could not be encrypted anew, the last one: %s", l.Failed, printable(l.LastFailure))
				}
			}
		}
		return lines.Err()
	})
	if err == nil && !done {
		err = errors.New("the server ended before it was done: what was done stays, run it again")
	}
	return err
}

func rekeyText(n *seal.RekeyStats, more bool) string {
	so := ""
	if more {
		so = "so far: "
	}
	return fmt.Sprintf("%s%s objects seen, %s encrypted anew with key %s (%s), %s had it, %s are plain, %s need a key that the server lacks, %s failed", so,
		Thousands(uint64(max(0, n.Seen))), Thousands(uint64(max(0, n.Rewritten))), printable(n.Key), kv.FormatBytes(n.Bytes),
		Thousands(uint64(max(0, n.Current))), Thousands(uint64(max(0, n.Plain))), Thousands(uint64(max(0, n.Unknown))), Thousands(uint64(max(0, n.Failed))))
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"
)

// operate does what an operator does to a node: clears it, sets a quota, gives it another size. A refusal, as
// that of a clear that a tier does not take, is logged: it is no fault of the schedule.
func (s *soak) operate(ctx context.Context, p *part, f fault) {
	var err error
	switch f.Kind {
	case "clear":
		err = s.ask(ctx, http.MethodPost, p.url("/cache/clear"), `{}`)
	case "quota":
		err = s.ask(ctx, http.MethodPut, p.url("/tenants/team"), fmt.Sprintf(`{"quota_bytes":%d}`, int64(1+int(f.For/time.Millisecond)%8)<<20))
	case "resize":
		if !p.end(syscall.SIGTERM, endLimits["node"]) {
			s.violation("%s did not end within %v of SIGTERM: its stacks are in %s", p.name, endLimits["node"], p.log)
		}
		i := slices.Index(p.args, "--l1-size-gb") + 1
		p.args[i] = []string{"24MiB", "32MiB", "48MiB"}[int(f.For/time.Millisecond)%3]
		err = p.start(s.alone)
	}
	if err != nil {
		s.logf("%s %s: %v", f.Kind, f.Target, err)
	}
}

// ask sends one request of an operator. An answer that is no success is an error.
func (s *soak) ask(ctx context.Context, method, url, body string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	a, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(a.Body, 500))
	if a.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s: %s", method, url, a.Status, b)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

type noDeletion struct {
	tier.Tier
	err error
}

func (n noDeletion) Delete(context.Context, []kv.Key) error { return n.err }

// A check tells a layout in which nothing is deleted from a user who may not delete.
func TestCheckSaysWhyObjectsStay(t *testing.T) {
	call := func(f func(context.Context) error) (time.Duration, error) { return 0, f(t.Context()) }
	f := func(err error, want string) {
		t.Helper()
		var out bytes.Buffer
		c := checking{w: &out, t: noDeletion{tier.NewMemory(1), err}}
		c.remove(t.Context(), make([]kv.Key, 3), call)
		if c.verdict != Partial || !strings.HasPrefix(out.String(), want) {
			t.Errorf("verdict %d, %q, want %q", c.verdict, out.String(), want)
		}
	}
	f(fmt.Errorf("%w: the layout has no deletion", tier.ErrNotKept), "The tier deletes nothing: ")
	f(errors.New("NOPERM"), "This user may not delete: NOPERM. 3 objects ")
}

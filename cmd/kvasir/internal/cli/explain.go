// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// explainPool adds advice to an error of pool.Open or pool.Drop. names are the flags that choose the pool's name.
func explainPool(err error, names string) error {
	if changed, ok := errors.AsType[*pool.ChangedError](err); ok {
		return explainChanged(changed)
	}
	switch {
	case errors.Is(err, pool.ErrInUse):
		return fmt.Errorf("%w: choose another %s, or stop that server", err, names)
	case errors.Is(err, pool.ErrOwner):
		return fmt.Errorf("%w: run as that user, or choose another %s", err, names)
	case errors.Is(err, pool.ErrIndex), errors.Is(err, shm.ErrNotOurs):
		return fmt.Errorf("%w: start with --cold to discard it, or remove it with --drop", err)
	case errors.Is(err, pool.ErrForeign):
		return fmt.Errorf("%w: choose another %s, or remove the file if nothing uses it", err, names)
	case errors.Is(err, pool.ErrNoSpace):
		return fmt.Errorf("%w: lower --l1-size-gb, or enlarge /dev/shm (containers: --shm-size or --ipc=host); kvasir pool ls shows what takes it", err)
	}
	return err
}

// explainChanged names, by flags, what differs between the pool that exists and the one asked for.
func explainChanged(e *pool.ChangedError) error {
	var kept, asked []string
	add := func(flag string, k, a any) {
		if k != a {
			kept, asked = append(kept, fmt.Sprintf("%s %v", flag, k)), append(asked, fmt.Sprint(a))
		}
	}
	add("--l1-align-bytes", e.Kept.Align, e.Asked.Align)
	add("--chunk-size", e.Kept.ChunkTokens, e.Asked.ChunkTokens)
	text := fmt.Sprintf("the pool that is kept in %s has %s, asked for is %s: start with what it has, or with --cold to discard it",
		e.Path, strings.Join(kept, " and "), strings.Join(asked, " and "))
	if e.Kept.ChunkTokens != e.Asked.ChunkTokens {
		text += ", and restart the engines (they asked for the chunk size when they started)"
	}
	return explained{text, e}
}

// explained is the error err with another text, for people. errors.Is and errors.As find err in it.
type explained struct {
	text string
	err  error
}

func (e explained) Error() string { return e.text }
func (e explained) Unwrap() error { return e.err }

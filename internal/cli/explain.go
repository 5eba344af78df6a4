package cli

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"

	"github.com/kvasir-kv/kvasir/pool"
	"github.com/kvasir-kv/kvasir/shm"
)

// listenError says which address cannot be listened on, why, and what helps: advice
// only where it is right. host and port are the flags that gave the address.
func listenError(err error, host, port string) error {
	advice := ""
	switch {
	case errors.Is(err, syscall.EADDRINUSE) && port == "":
		advice = "another process listens there: stop it, or choose another " + host
	case errors.Is(err, syscall.EADDRINUSE):
		advice = "choose another " + port + ", or stop the process that has it"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		advice = host + " is no address of this machine"
	case errors.Is(err, syscall.EACCES) && port != "":
		advice = "ports below 1024 need a privilege: choose another " + port
	case errors.Is(err, syscall.EACCES):
		advice = "this user may not create " + host
	case errors.Is(err, syscall.ENOENT):
		advice = "the directory of " + host + " is not there"
	default:
		if _, ok := errors.AsType[*net.DNSError](err); ok {
			advice = host + " is no address, and no name that is known here"
		}
	}
	if advice == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, advice)
}

// explainPool adds what to do to an error of pool.Open or pool.Drop. names are the
// flags that choose the pool's name.
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
		return fmt.Errorf("%w: lower --l1-size-gb, or enlarge /dev/shm (containers: --shm-size or --ipc=host)", err)
	}
	return err
}

// explainChanged names what differs, as flags.
func explainChanged(e *pool.ChangedError) error {
	var kept, asked []string
	add := func(flag string, k, a any) {
		if k != a {
			kept, asked = append(kept, fmt.Sprintf("%s %v", flag, k)), append(asked, fmt.Sprint(a))
		}
	}
	add("--l1-size-gb", gibSize(e.Kept.Bytes), gibSize(e.Asked.Bytes))
	add("--l1-align-bytes", e.Kept.Align, e.Asked.Align)
	add("--chunk-size", e.Kept.ChunkTokens, e.Asked.ChunkTokens)
	text := fmt.Sprintf("the pool that is kept in %s has %s, asked for is %s: start with what it has, or with --cold to discard it",
		e.Path, strings.Join(kept, " and "), strings.Join(asked, " and "))
	if e.Kept.ChunkTokens != e.Asked.ChunkTokens {
		text += ", and restart the engines (they asked for the chunk size when they started)"
	}
	return explained{text, e}
}

// explained is an error in other words.
type explained struct {
	text string
	err  error
}

func (e explained) Error() string { return e.text }
func (e explained) Unwrap() error { return e.err }

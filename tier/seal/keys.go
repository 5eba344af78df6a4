// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv"
)

// Limits of keys.
const (
	maxKeys        = 16                     // keys in use; a text with more is an error
	maxKeyText     = 64 << 10               // bytes of a file, or that a command prints; a longer text is an error
	commandTime    = 10 * time.Second       // time limit of the command; then it is killed
	commandRefresh = time.Hour              // time between two runs of the command
	reloadPause    = 200 * time.Millisecond // time between the two reads of a Reload
	commandSettle  = 5 * time.Second        // see Keys.settle
)

// key is a master key and the values that are derived from it.
type key struct {
	master [32]byte
	id     [idBytes]byte
	number uint16 // its short name, from 1
	mask   [32]byte
}

func newKey(master [32]byte) *key {
	k := &key{master: master}
	derive := func(out []byte, info string) {
		b, err := hkdf.Key(sha256.New, master[:], nil, info, len(out))
		if err != nil {
			panic("BUG: seal: " + err.Error())
		}
		copy(out, b)
	}
	derive(k.id[:], "kvasir tier key id 1")
	derive(k.mask[:], "kvasir tier checksum 1")
	k.number = max(1, binary.LittleEndian.Uint16(k.id[:]))
	return k
}

// masked hides the xxh3 of an object, or recovers it. The plain xxh3 beside a sealed object would tell whether a guess of its content is
// right.
func (k *key) masked(sum uint64, name *kv.Key) uint64 {
	var b [32 + nameBytes]byte
	copy(b[:], k.mask[:])
	putName(b[32:], name)
	pad := sha256.Sum256(b[:])
	return sum ^ binary.LittleEndian.Uint64(pad[:])
}

// ring has the keys in use. The first one encrypts; each of them decrypts.
type ring struct {
	list     []*key
	byNumber map[uint16]*key
}

func (r *ring) has(id [idBytes]byte) bool {
	for _, k := range r.list {
		if k.id == id {
			return true
		}
	}
	return false
}

// Source says where the keys come from. At most one of its fields may be set.
type Source struct {
	File    string // read again when it changes
	Command string // shell command (/bin/sh) that prints the keys
	Text    string // the keys themselves, from the environment
}

// Keys are master keys. The methods are safe for concurrent use. A nil *Keys has no keys.
type Keys struct {
	source Source
	file   *auth.File
	all    atomic.Pointer[ring]
	mu     sync.Mutex    // one Reload at a time
	settle time.Duration // time between the two runs of a command that prints fewer keys than before: see load
}

// ErrSource means that several sources of keys are given.
var ErrSource = errors.New("keys of tiers are given in more than one way: choose a file, a command or the environment")

// OpenKeys reads the keys, one on each line: 32 bytes as 64 hexadecimal digits or in base64. Empty lines and lines that begin with # are
// skipped. The first key encrypts, all of them decrypt. Without a source there are no keys, and Keys is nil. Errors: ErrSource, and why a
// key cannot be used; errors never contain a key.
func OpenKeys(ctx context.Context, s Source) (*Keys, error) {
	given := 0
	for _, text := range []string{s.File, s.Command, s.Text} {
		if text != "" {
			given++
		}
	}
	switch given {
	case 0:
		return nil, nil
	case 1:
	default:
		return nil, ErrSource
	}
	k := &Keys{source: s, settle: commandSettle}
	k.all.Store(&ring{})
	if s.File != "" {
		var err error
		k.file, err = auth.OpenFile(auth.FileOptions{Path: s.File, MaxBytes: maxKeyText, Parse: k.parse})
		if err != nil {
			return nil, fmt.Errorf("keys of tiers: %w", err)
		}
		return k, nil
	}
	if err := k.load(ctx); err != nil {
		return nil, fmt.Errorf("keys of tiers: %w", err)
	}
	return k, nil
}

// load sets the keys from the environment or the command. If the command omits a key in use, it may have failed in the middle: it must then
// print the same text again after settle (5 s).
func (k *Keys) load(ctx context.Context) error {
	c, text, err := k.printed(ctx)
	if err != nil {
		return err
	}
	if c.Removed > 0 && k.source.Command != "" {
		select {
		case <-time.After(k.settle):
		case <-ctx.Done():
			return ctx.Err()
		}
		again, now, err := k.printed(ctx)
		switch {
		case err != nil:
			return err
		case !bytes.Equal(now, text):
			return fmt.Errorf("the command of keys omitted %d keys in use, and printed another text %v later: try again", c.Removed, k.settle)
		}
		c = again
	}
	c.Take()
	return nil
}

// printed reads the environment or runs the command. It returns the text and the change that its keys make.
func (k *Keys) printed(ctx context.Context) (c auth.Change, text []byte, err error) {
	from := "the environment"
	text = bytes.ReplaceAll([]byte(k.source.Text), []byte(","), []byte("\n"))
	if k.source.Command != "" {
		from = "the command of keys"
		if text, err = output(ctx, k.source.Command); err != nil {
			return c, nil, err
		}
	}
	if c, err = k.parse(text); err == nil && c.Entries == 0 {
		err = errors.New("it holds no key")
	}
	if err != nil {
		return c, nil, fmt.Errorf("%s: %w", from, err)
	}
	return c, text, nil
}

// parse returns the change that a text of keys makes.
func (k *Keys) parse(text []byte) (auth.Change, error) {
	next, err := parseKeys(text)
	if err != nil {
		return auth.Change{}, err
	}
	removed := 0
	for _, was := range k.all.Load().list {
		if !next.has(was.id) {
			removed++
		}
	}
	return auth.Change{Take: func() { k.all.Store(next) }, Entries: len(next.list), Removed: removed}, nil
}

// parseKeys parses a text of keys. Its errors name the number of a line and never quote the line.
func parseKeys(text []byte) (*ring, error) {
	next := &ring{byNumber: make(map[uint16]*key)}
	n := 0
	for line := range bytes.Lines(text) {
		n++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		master, err := parseKey(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		one := newKey(master)
		switch other := next.byNumber[one.number]; {
		case other != nil && other.id == one.id:
			return nil, fmt.Errorf("line %d: the same key as on an earlier line", n)
		case other != nil:
			return nil, fmt.Errorf("line %d: this key has the short name of another one, %04x, by chance: make another key", n, one.number)
		case len(next.list) == maxKeys:
			return nil, fmt.Errorf("more than %d keys", maxKeys)
		}
		next.list, next.byNumber[one.number] = append(next.list, one), one
	}
	return next, nil
}

var errKey = errors.New("a key is 32 bytes, as 64 hexadecimal digits or in base64 (openssl rand -hex 32 makes one)")

func parseKey(line []byte) (master [32]byte, err error) {
	b, err := hex.DecodeString(string(line))
	if err != nil {
		b, err = base64.StdEncoding.DecodeString(string(line))
	}
	if err != nil || len(b) != len(master) {
		return master, errKey
	}
	copy(master[:], b)
	if master == ([32]byte{}) {
		return master, errors.New("a key must not be all zeros")
	}
	return master, nil
}

// output returns what a command prints, at most maxKeyText bytes, within commandTime. Its errors do not quote the command's error messages,
// which may contain keys.
func output(ctx context.Context, command string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	c := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) } // its children, too
	c.WaitDelay = time.Second                                                        // for children outside the process group that keep the output open
	text := &printed{full: cancel}
	c.Stdout = text
	ended := c.Run()
	var err error
	switch {
	case len(text.b) > maxKeyText:
		err = fmt.Errorf("it prints more than %d bytes", maxKeyText)
	case ctx.Err() != nil:
		err = fmt.Errorf("it did not end within %v", commandTime)
	case errors.Is(ended, exec.ErrWaitDelay):
		err = errors.New("it ended, and a program that it started keeps its output open: send that one's elsewhere (>/dev/null)")
	default:
		err = ended
	}
	if err != nil {
		return nil, fmt.Errorf("the command of keys: %w; run it by hand to see why", err)
	}
	return text.b, nil
}

// printed collects the output of a command, up to one byte more than maxKeyText.
type printed struct {
	b    []byte
	full func() // ends the command
}

func (p *printed) Write(b []byte) (int, error) {
	p.b = append(p.b, b[:min(len(b), maxKeyText+1-len(p.b))]...)
	if len(p.b) > maxKeyText {
		p.full()
	}
	return len(b), nil
}

// Watch reads the keys again when their file changes, or every hour from a command, until ctx ends. If it cannot read
// them, it logs that, and the former keys stay in use.
func (k *Keys) Watch(ctx context.Context, log *slog.Logger) {
	switch {
	case k == nil:
	case k.file != nil:
		k.file.Watch(ctx, auth.WatchInterval, log)
	case k.source.Command != "":
		tick := time.NewTicker(commandRefresh)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
			if err := k.Reload(ctx); err != nil {
				log.Error("the keys of tiers cannot be read again: the former keys stay in use", "err", err)
			}
		}
	}
}

// Reload reads the keys again now. It accepts a file if two reads find the same text, which ends with a newline or has the keys in use, and
// if no key in use is missing. Otherwise it returns an error, and Watch may accept the file later.
func (k *Keys) Reload(ctx context.Context) error {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.file == nil {
		return k.load(ctx)
	}
	path := k.source.File
	first, err := auth.ReadSecret(path, maxKeyText)
	if err != nil {
		return err
	}
	select {
	case <-time.After(reloadPause):
	case <-ctx.Done():
		return ctx.Err()
	}
	text, err := auth.ReadSecret(path, maxKeyText)
	if err != nil {
		return err
	}
	c, err := k.parse(text)
	switch {
	case !bytes.Equal(text, first):
		return &auth.FileError{Path: path, Reason: "it changed while it was read: try again"}
	case err != nil:
		return fmt.Errorf("%s: %w", path, err)
	case c.Entries == 0:
		return &auth.FileError{Path: path, Reason: "it has no entry"}
	case text[len(text)-1] != '\n' && !k.takes(text):
		return &auth.FileError{Path: path, Reason: "its last line does not end, it may be half written"}
	case c.Removed > 0:
		return &auth.FileError{Path: path, Reason: fmt.Sprintf("%d keys in use are missing in it: they are removed once the file has stayed the same for some seconds; try again then", c.Removed)}
	}
	c.Take()
	return nil
}

// takes reports whether a text has exactly the keys in use, in their order.
func (k *Keys) takes(text []byte) bool {
	next, err := parseKeys(text)
	return err == nil && slices.EqualFunc(next.list, k.all.Load().list, func(a, b *key) bool { return a.id == b.id })
}

// IDs returns the ids of the keys, the one that encrypts first. They are no secrets.
func (k *Keys) IDs() (out []string) {
	if k == nil {
		return nil
	}
	for _, one := range k.all.Load().list {
		out = append(out, hex.EncodeToString(one.id[:]))
	}
	return out
}

func (k *Keys) ring() *ring {
	if k == nil {
		return &ring{}
	}
	return k.all.Load()
}

// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

const (
	soakDir    = "KVASIR_TEST_DISK"       // the directory of a process that is to be killed
	soakFrom   = "KVASIR_TEST_DISK_FROM"  // its first object
	soakLimit  = "KVASIR_TEST_DISK_LIMIT" // the directory's limit
	soakRounds = 10                       // processes that use one directory, one after another
	soakBatch  = 32
)

func soakOptions(dir string, limit int64) Options {
	return Options{Dirs: []Dir{{dir, limit}}, SegmentBytes: 1 << 20, MinFree: 1, FirstTouch: true, ScrubRate: 1 << 30}
}

func soakObject(obj int) ([]byte, tier.Meta) {
	b, meta := tiertest.Object(obj, 1+obj*7919%60_000)
	own := make([]byte, len(b)+1)[1:]
	copy(own, b)
	return own, meta
}

// soakChild is a process that writes, reads and deletes until it is killed. It prints what it
// did: w and the object after a write, D before and d after a delete, and s once all of that is
// sealed.
func soakChild() bool {
	dir := os.Getenv(soakDir)
	if dir == "" {
		return false
	}
	from, _ := strconv.Atoi(os.Getenv(soakFrom))
	limit, _ := strconv.ParseInt(os.Getenv(soakLimit), 10, 64)
	d, err := Open(soakOptions(dir, limit))
	if err != nil {
		fmt.Println("error", err)
		return true
	}
	ctx := context.Background()
	for batch := from; ; batch += soakBatch {
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				for obj := batch + g; obj < batch+soakBatch; obj += 4 {
					b, meta := soakObject(obj)
					if err := d.Write(ctx, tiertest.Key(obj), meta, b); err == nil {
						fmt.Println("w", obj)
					} else if !errors.Is(err, tier.ErrNotKept) {
						fmt.Println("error", err)
					}
					if obj%5 == 4 {
						fmt.Println("D", obj-4)
						if err := d.Delete(ctx, []kv.Key{tiertest.Key(obj - 4)}); err != nil {
							fmt.Println("error", err)
						}
						fmt.Println("d", obj-4)
					}
					_, _ = d.Read(ctx, tiertest.Key(obj/2), b)
				}
			})
		}
		wg.Wait()
		if err := d.Flush(ctx); err != nil {
			fmt.Println("error", err)
		}
		fmt.Println("s", batch)
	}
}

// soak is what is known of a directory.
type soak struct {
	t                     *testing.T
	rand                  *rand.Rand
	dir                   string
	limit                 int64
	written, sealed, gone map[int]bool
	next                  int
}

// round runs a process, kills it, damages the bytes that it had not synced, and checks the
// rest.
func (s *soak) round() {
	cmd := exec.CommandContext(s.t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), soakDir+"="+s.dir, soakFrom+"="+strconv.Itoa(s.next), soakLimit+"="+strconv.FormatInt(s.limit, 10))
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.written = map[int]bool{}
	kill := time.AfterFunc(time.Duration(20+s.rand.IntN(120))*time.Millisecond, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	unsure := s.follow(out)
	_ = cmd.Wait() // it was killed
	if s.rand.IntN(2) == 0 {
		s.cutPower()
	}
	s.look(unsure)
}

// follow notes the output of a process until it ends. It returns the objects that the process may have deleted.
func (s *soak) follow(out io.Reader) (unsure map[int]bool) {
	unsure = map[int]bool{}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		obj, err := strconv.Atoi(rest)
		if word == "error" || err != nil {
			s.t.Errorf("the process says %q", lines.Text())
			continue
		}
		s.next = max(s.next, obj+soakBatch)
		switch word {
		case "w":
			s.written[obj] = true
		case "D":
			unsure[obj] = true
		case "d":
			s.gone[obj] = true
		case "s":
			for obj := range s.written {
				s.sealed[obj] = true
			}
		}
	}
	return unsure
}

// cutPower damages the segments that are not sealed, and nothing else.
func (s *soak) cutPower() {
	names, _ := filepath.Glob(filepath.Join(s.dir, "*"+suffix))
	for _, name := range names {
		fd, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			s.t.Fatal(err)
		}
		info, _ := fd.Stat()
		_, id, _ := parseSegment(filepath.Base(name))
		f := osFile{fd: int(fd.Fd())}
		if _, _, err := readIndex(f, id, info.Size()); err != nil {
			for range 1 + s.rand.IntN(200) {
				junk := make([]byte, sector*(1+s.rand.IntN(4)))
				if s.rand.IntN(2) == 0 {
					junk[s.rand.IntN(len(junk))] = 1
				}
				if _, err := fd.WriteAt(junk, s.rand.Int64N(max(1, info.Size()/sector))*sector); err != nil {
					s.t.Fatal(err)
				}
			}
			if s.rand.IntN(3) == 0 {
				_ = fd.Truncate(s.rand.Int64N(info.Size() + 1))
			}
		}
		_ = fd.Close()
	}
}

// look opens the directory and compares everything in it with what is known.
func (s *soak) look(unsure map[int]bool) {
	d := open(s.t, soakOptions(s.dir, s.limit))
	defer closeDisk(s.t, d)
	found := 0
	for obj := range s.next + 2*soakBatch {
		want, _ := soakObject(obj)
		switch err := get(s.t, d, obj, len(want), 1); {
		case err == nil && s.gone[obj]:
			s.t.Errorf("object %d was deleted and is there", obj)
		case err == nil:
			found++
			s.sealed[obj] = true // by the Close that follows
		case !errors.Is(err, tier.ErrMissing):
			s.t.Errorf("object %d: %v", obj, err)
		case s.sealed[obj] && !s.gone[obj] && !unsure[obj] && s.limit > 1<<30:
			s.t.Errorf("object %d was sealed and is not there", obj)
		}
		if unsure[obj] {
			s.gone[obj] = err1(get(s.t, d, obj, len(want), 0))
		}
	}
	if st := d.Stats(); st.Bytes[s.dir] > s.limit {
		s.t.Errorf("%d bytes, above the limit of %d", st.Bytes[s.dir], s.limit)
	}
	if s.limit > 1<<30 && found == 0 && len(s.sealed) > soakBatch {
		s.t.Error("nothing is there")
	}
}

func err1(err error) bool { return err != nil }

// Processes are killed while they write, read and delete, half of them with a power cut. The disk serves no
// wrong byte, loses no sealed object, and no deleted object comes back. SOAK is the number of
// processes.
func TestSoak(t *testing.T) {
	rounds := 6
	if n, err := strconv.Atoi(os.Getenv("SOAK")); err == nil {
		rounds = n
	}
	var s *soak
	for round := range rounds {
		if round%soakRounds == 0 || rounds <= soakRounds && round == rounds/2 {
			limit := int64(2 << 30) // more than is ever written
			if round%(2*soakRounds) != 0 {
				limit = 6 << 20
			}
			s = &soak{t, rand.New(rand.NewPCG(uint64(round), 3)), t.TempDir(), limit, nil, map[int]bool{}, map[int]bool{}, 0}
		}
		if s.round(); t.Failed() {
			t.Fatalf("round %d in %s, with a limit of %d", round, s.dir, s.limit)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// These, when set, make this test binary a client in a process of its own.
const (
	visitURL     = "KVASIR_TEST_VISIT"
	visitSegment = "KVASIR_TEST_SEGMENT" // which it tries to lend
	visitID      = "KVASIR_TEST_ID"      // of its own worker
	visitHide    = "KVASIR_TEST_HIDE"    // a folder that it sees another file system at
)

const victim = 77 // the instance of the user whom it visits

// visited is what a client of another process was answered.
type visited struct {
	Pool     lmcache.Pool
	Slots    int
	Ping     bool // of the victim's instance
	Mapped   bool // the segment was taken: a store from it is done
	Pickled  bool // its own chunk was taken through the socket
	Victim   bool // a store as the victim was taken
	Problems []string
}

// visit is a client's life: it registers, tries what is not its, and stores a chunk
// of its own.
func visit(url string) {
	ctx, cancel := context.WithTimeout(context.Background(), 120*time.Second)
	defer cancel()
	var got visited
	note := func(err error) {
		if err != nil {
			got.Problems = append(got.Problems, err.Error())
		}
	}
	if dir := os.Getenv(visitHide); dir != "" {
		note(syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=0700"))
		note(os.WriteFile(filepath.Join(dir, "pool"), make([]byte, 16*4096), 0o600)) // what another server left
	}
	c, err := lmcache.NewClient(url)
	note(err)
	defer c.Close()
	id, err := strconv.ParseInt(os.Getenv(visitID), 10, 64)
	note(err)
	got.Pool, err = c.RegisterEngineDriven(ctx, &lmcache.EngineDriven{
		InstanceID: id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: smallLayout.Layers, Hidden: smallLayout.Hidden,
		DType: smallLayout.DType, SinglePlane: smallLayout.SinglePlane, PhysicalSlots: smallLayout.Slots,
	})
	note(err)
	own := promptKey(int(id), 1)
	slots, err := c.PrepareStore(ctx, own, id, nil)
	note(err)
	got.Slots = len(slots.Slots)
	data := pickled(new(testing.T), 1, 5)
	commit := func(k *lmcache.Key, id int64) bool {
		r, err := c.Call(ctx, lmcache.OpCommitStore, k.Append(nil), lmcache.AppendInt(nil, id), lmcache.AppendBytes(nil, data))
		note(err)
		ok, err := lmcache.DecodeBool(r)
		note(err)
		return ok
	}
	got.Pickled = commit(own, id)
	got.Ping, err = c.Ping(ctx, victim)
	note(err)
	got.Victim = commit(promptKey(51, 1), victim)
	note(c.UnregisterEngineDriven(ctx, victim))
	reg := lmcache.KVCache{
		InstanceID: 6, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD",
		Descriptors: []lmcache.Descriptor{descriptor("/" + os.Getenv(visitSegment))},
	}
	note(c.RegisterKVCache(ctx, &reg))
	k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(16, 52), End: 16, RequestID: "s", Readers: 1}
	copied, err := c.StoreBlocks(ctx, k, 6, [][]int{{1}})
	got.Mapped = err == nil && copied.OK
	note(json.NewEncoder(os.Stdout).Encode(got))
}

func visitAs(t *testing.T, uid, id int, url, segment string) (got visited) {
	t.Helper()
	return visitBy(t, exec.Command("/proc/self/exe"), uid, id, url, segment)
}

func visitBy(t *testing.T, cmd *exec.Cmd, uid, id int, url, segment string) (got visited) {
	t.Helper()
	cmd.Env = append(append(os.Environ(), cmd.Env...), visitURL+"="+url, visitSegment+"="+segment, visitID+"="+strconv.Itoa(id))
	cmd.Stderr, cmd.Dir = os.Stderr, "/"
	if uid != os.Geteuid() {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid), NoSetGroups: true}}
	}
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &got)
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if len(got.Problems) > 0 {
		t.Errorf("uid %d: %q", uid, got.Problems)
	}
	return got
}

// A process of another user, on TCP and on the UNIX socket: it is told no places,
// lends no memory of ours, and does not act for our worker. Its own chunks pass
// through the socket. A process of our user is told places, as before.
func TestAnotherUsersProcess(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to start a client as another user")
	}
	dir := t.TempDir()
	for d := dir; d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n, stop := startNode(t, dir, 64, server.Options{Pickle: server.PickleOn, ShmDir: dir})
	defer stop()
	ipc := "ipc://" + filepath.Join(dir, "socket")
	if _, err := n.Listen(t.Context(), ipc); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(strings.TrimPrefix(ipc, "ipc://"), 0o666); err != nil {
		t.Fatal(err)
	}
	segment, end := lender(t, dir)
	defer end()
	us := &visitor{t, n.Server, sameUser, victim}
	us.register()
	if got := us.prepareStore(promptKey(1, 1)); len(got.Slots) != 1 || !us.commitStore(promptKey(1, 1), nil) {
		t.Fatalf("%+v", got)
	}
	for i, url := range []string{n.url, ipc} {
		got := visitAs(t, 65533-i, 100+i, url, segment)
		if got.Pool.ShmName != "" || got.Pool.Bytes != 0 || got.Slots != 0 {
			t.Errorf("%s: another user is told of %+v, %d places", url, got.Pool, got.Slots)
		}
		if !got.Pickled {
			t.Errorf("%s: another user's own chunk is not taken", url)
		}
		if got.Ping || got.Victim || got.Mapped {
			t.Errorf("%s: another user acts for our worker or lends our memory: %+v", url, got)
		}
		k := promptKey(10+i, 1)
		if slots := us.prepareStore(k); len(slots.Slots) != 1 || !us.commitStore(k, nil) {
			t.Errorf("%s: our worker is gone", url)
		}
	}
	got := visitAs(t, 0, 200, n.url, segment)
	if got.Pool.ShmName == "" || got.Slots != 1 {
		t.Errorf("our own user is not told of the pool: %+v\n%s", got, n.log.String())
	}
}

// A process of this user that sees another file system where the pool is, as in a
// container of its own, is not told of the pool: under its name it would find
// another file. One that sees the pool is.
func TestProcessWithAnotherShmDoesNotLearnThePool(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{Pickle: server.PickleOn})
	defer stop()
	if got := visitAs(t, os.Geteuid(), 9, n.url, "none"); got.Pool.ShmName == "" || got.Slots != 1 {
		t.Fatalf("a process that sees the pool: %+v", got)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{visitHide + "=" + n.dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if err := exec.Command("unshare", "-Urm", "true").Run(); err != nil {
		t.Skipf("no user and mount namespace of its own here: %v", err)
	}
	got := visitBy(t, cmd, os.Geteuid(), 10, n.url, "none")
	if got.Pool.ShmName != "" || got.Slots != 0 || !got.Pickled {
		t.Errorf("a process with another file system there: %+v\n%s", got, n.log)
	}
}

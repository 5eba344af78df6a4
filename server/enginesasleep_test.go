// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
)

// A worker that is asleep has a layout, too: its next request wakes it, and what an engine of another layout wrote meanwhile under LMCache's
// names would be its own.
func TestALayoutThatIsAsleepCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, server.Options{WorkerReap: 5 * time.Second, RegistrationGrace: 5 * time.Second})
		v, s := d.vllm(1, vllmForm).register(), d.sglang(2, sglangForm)
		v.put(1, 1, "")
		named := func(what string) {
			t.Helper()
			for _, in := range d.Registry().List() {
				ns := in.NamespaceOf(nil)
				n, ok := d.NameOf(ns)
				if _, has := n.LMCache(kv.Key{Namespace: ns}); !ok || has {
					t.Errorf("%s: worker %d: known %v, has a name %v", what, in.ID, ok, has)
				}
			}
		}
		sleep := func() {
			t.Helper()
			for range 9 {
				time.Sleep(time.Second)
				d.Tick(time.Now())
			}
			if w := d.Status().Workers; !w[0].Asleep {
				t.Fatalf("%+v", w)
			}
		}
		sleep()
		s.register()
		s.put(1, 1, "")
		named("the other one is asleep")
		v.ping()
		v.want("it is awake again", 1, 1)
		named("both are awake")
		sleep()
		d.restart()
		named("restart")
	})
}

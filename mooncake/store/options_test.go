// SPDX-License-Identifier: Apache-2.0

package store

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestOptionsValidate(t *testing.T) {
	testkit.CheckNumbers[MasterOptions](t)
	testkit.CheckNumbers[ClientOptions](t)
	for _, a := range []string{"", "host", ":1", "host:", "etcd://host", "host:70000", "host:65536", "host:0", "host:-1"} {
		if (MasterOptions{Addresses: []string{a}}).Validate() == nil {
			t.Errorf("%q is an address", a)
		}
	}
	if err := (MasterOptions{Addresses: []string{"host:1", "[::1]:65535"}}).Validate(); err != nil {
		t.Error(err)
	}
	if _, err := NewMaster(MasterOptions{Addresses: []string{"host"}, MaxConns: -1}); err == nil {
		t.Error("a master without a port, and fewer than no connections")
	}
	if _, err := NewNode(nil, NodeOptions{Memory: make([]byte, 1<<20), Host: "0.0.0.0", PingEvery: -1, Grace: -1}); err == nil {
		t.Error("no error")
	}
}

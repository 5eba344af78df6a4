// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// oldClient is one socket of a client that numbers its operations itself.
type oldClient struct {
	t       *testing.T
	dealer  *zmtp.Dealer
	uid     byte
	replies chan [][]byte
}

// dial connects a client whose next request has number uid: 0 for a new one, more
// for one that outlived a server.
func (n *node) dial(t *testing.T, uid byte) *oldClient {
	t.Helper()
	c := &oldClient{t: t, uid: uid, replies: make(chan [][]byte, 64)}
	c.dealer = zmtp.NewDealer(n.url, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		own := make([][]byte, len(m))
		for i := range m {
			own[i] = bytes.Clone(m[i])
		}
		c.replies <- own
	}})
	if err := c.dealer.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.dealer.Close() })
	return c
}

func (c *oldClient) send(op byte, payloads ...[]byte) (uid byte) {
	c.t.Helper()
	uid = c.uid
	c.uid++
	if err := c.dealer.Send(append([][]byte{{uid}, {op}}, payloads...)...); err != nil {
		c.t.Fatal(err)
	}
	return uid
}

// answer returns the result frame of the next reply, nil for None.
func (c *oldClient) answer(uid byte) []byte {
	c.t.Helper()
	select {
	case m := <-c.replies:
		if m[0][0] != uid {
			c.t.Fatalf("reply to request %d, not to %d", m[0][0], uid)
		}
		if len(m) == 2 {
			return nil
		}
		return m[2]
	case <-time.After(60 * time.Second):
		c.t.Fatalf("no reply to request %d", uid)
		return nil
	}
}

func (c *oldClient) call(op byte, payloads ...[]byte) []byte {
	c.t.Helper()
	return c.answer(c.send(op, payloads...))
}

// quiet reports that no reply has come when a later request is answered.
func (c *oldClient) quiet(op byte, payloads ...[]byte) {
	c.t.Helper()
	c.send(op, payloads...)
	time.Sleep(20 * time.Millisecond)
	select {
	case m := <-c.replies:
		c.t.Fatalf("operation %d got the reply %x", op, m)
	default:
	}
}

// oldKey is a key as clients before 0.5.5 send it.
func oldKey(worker int, seed, tokenCount int, request string) []byte {
	return tokenKey("m", worker, seed, tokenCount, request)
}

func tokenKey(model string, worker int, seed, tokenCount int, request string) []byte {
	b := msgp.AppendMapHeader(nil, 8)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), model)
	b = msgp.AppendInt(msgp.AppendString(b, "world_size"), 1)
	b = msgp.AppendString(b, "worker_id")
	if worker == lmcache.AllWorkers {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendInt(b, worker)
	}
	b = lmcache.AppendTokens(msgp.AppendString(b, "token_ids"), tokens(tokenCount, seed))
	b = msgp.AppendInt(msgp.AppendString(b, "start"), 0)
	b = msgp.AppendInt(msgp.AppendString(b, "end"), tokenCount)
	b = msgp.AppendString(msgp.AppendString(b, "request_id"), request)
	return msgp.AppendString(msgp.AppendString(b, "cache_salt"), "")
}

// oldRegistration is a worker of smallLayout without num_physical_slots.
func oldRegistration(id int64) []byte {
	b := msgp.AppendMapHeader(nil, 8)
	b = msgp.AppendInt64(msgp.AppendString(b, "instance_id"), id)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), "m")
	b = msgp.AppendInt(msgp.AppendString(b, "world_size"), 1)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), 16)
	b = msgp.AppendInt(msgp.AppendString(b, "num_layers"), smallLayout.Layers)
	b = msgp.AppendInt(msgp.AppendString(b, "hidden_dim_size"), smallLayout.Hidden)
	b = msgp.AppendString(msgp.AppendString(b, "dtype_str"), smallLayout.DType)
	return msgp.AppendBool(msgp.AppendString(b, "use_mla"), smallLayout.SinglePlane)
}

var (
	integer = func(v int64) []byte { return lmcache.AppendInt(nil, v) }
	text    = func(s string) []byte { return lmcache.AppendString(nil, s) }
	empty   = lmcache.AppendBytes(nil, nil)
	yes, no = lmcache.AppendBool(nil, true), lmcache.AppendBool(nil, false)
)

func (c *oldClient) want(got, want []byte, what string) {
	c.t.Helper()
	if !bytes.Equal(got, want) {
		c.t.Errorf("%s: %x, want %x", what, got, want)
	}
}

// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

// Memory is a Tier in this process's memory, for tests and trials. It has a limit of
// bytes and evicts the oldest object first.
type Memory struct {
	limit int64
	mu    struct {
		sync.Mutex
		bytes   int64
		objects map[kv.Key]object
		order   []kv.Key // in the order of the writes; includes deleted keys
	}
}

type object struct {
	meta Meta
	data []byte
}

// NewMemory returns an empty Memory for that many bytes.
func NewMemory(limit int64) *Memory {
	m := &Memory{limit: limit}
	m.mu.objects = make(map[kv.Key]object)
	return m
}

// Stat implements Tier.
func (m *Memory) Stat(ctx context.Context, keys []kv.Key, metas []Meta) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range keys {
		if metas[i] = m.mu.objects[keys[i]].meta; metas[i].Over(time.Now()) {
			metas[i] = Meta{}
		}
	}
	return ctx.Err()
}

// Read implements Tier.
func (m *Memory) Read(ctx context.Context, k kv.Key, dst []byte) (Meta, error) {
	m.mu.Lock()
	o, ok := m.mu.objects[k]
	m.mu.Unlock() // an object's bytes never change
	switch {
	case ctx.Err() != nil:
		return Meta{}, ctx.Err()
	case !ok || o.meta.Over(time.Now()):
		return Meta{}, ErrMissing
	case len(o.data) != len(dst):
		return Meta{}, &CorruptError{Key: k, Want: Meta{Len: int64(len(dst))}, Got: o.meta}
	}
	copy(dst, o.data)
	return o.meta, nil
}

// Write implements Tier.
func (m *Memory) Write(ctx context.Context, k kv.Key, meta Meta, src []byte) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if meta.Len != int64(len(src)) || meta.Len < 1 || meta.Len > m.limit {
		return fmt.Errorf("tier: write of %d bytes for an object of %d, with room for %d", len(src), meta.Len, m.limit)
	}
	data := bytes.Clone(src)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deleteLocked(k)
	for len(m.mu.order) > 0 && m.mu.bytes+meta.Len > m.limit {
		m.deleteLocked(m.mu.order[0])
		m.mu.order = m.mu.order[1:]
	}
	m.mu.objects[k] = object{meta, data}
	if len(m.mu.order) > 2*len(m.mu.objects)+16 { // mostly deleted keys
		m.mu.order = slices.DeleteFunc(m.mu.order, func(k kv.Key) bool { _, ok := m.mu.objects[k]; return !ok })
	}
	m.mu.order = append(m.mu.order, k)
	m.mu.bytes += meta.Len
	return nil
}

// Delete implements Tier.
func (m *Memory) Delete(ctx context.Context, keys []kv.Key) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range keys {
		m.deleteLocked(k)
	}
	return ctx.Err()
}

func (m *Memory) deleteLocked(k kv.Key) {
	if o, ok := m.mu.objects[k]; ok {
		m.mu.bytes -= o.meta.Len
		delete(m.mu.objects, k)
	}
}

// List implements Lister.
func (m *Memory) List(ctx context.Context, f func(kv.Key, Meta) bool) error {
	m.mu.Lock()
	metas := make(map[kv.Key]Meta, len(m.mu.objects))
	for k, o := range m.mu.objects {
		if !o.meta.Over(time.Now()) {
			metas[k] = o.meta
		}
	}
	m.mu.Unlock()
	for k, meta := range metas {
		if ctx.Err() != nil || !f(k, meta) {
			break
		}
	}
	return ctx.Err()
}

// Close implements Tier.
func (m *Memory) Close() error { return nil }

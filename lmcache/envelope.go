// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// ErrEnvelope means that bytes are not a tensor envelope, or that the envelope does not fit the worker's registration.
var ErrEnvelope = errors.New("lmcache: bad tensor envelope")

// Envelope has the objects of a transfer that a message carries since 0.5.7. It is msgpack; earlier releases sent a pickle.
//
//	{"version": 1, "tensors": [{"dtype", "shape", "data"} ...]}                          one group: a tensor for each chunk
//	{"version": 1, "groups": [{"chunk_indices": [...], "tensors": [...]} ...]}           several: an entry for each group
type Envelope struct {
	Groups []EnvelopeGroup // exactly one if the registration has one object group
}

// EnvelopeGroup has the objects of one group, in the order of their chunks.
type EnvelopeGroup struct {
	Chunks []int    // positions in the range, rising
	Data   [][]byte // alias the frame, or the pool
}

const envelopeVersion = 1

// DecodeEnvelope reads an envelope for a range of `chunks` chunks. layouts has one layout for each object group. An envelope with any other
// field, type, shape or length is an error. The result aliases data.
func DecodeEnvelope(data []byte, layouts []kv.Layout, chunks int) (e Envelope, err error) {
	several := len(layouts) > 1
	version, seen := 0, 0
	rest, err := readMap(data, func(name, b []byte) (rest []byte, err error) {
		seen++
		switch {
		case string(name) == "version":
			version, rest, err = readCount(b, 255)
			return rest, err
		case string(name) == "tensors" && !several && e.Groups == nil:
			e.Groups = make([]EnvelopeGroup, 1)
			rest, err = readTensors(b, &layouts[0], chunks, &e.Groups[0])
			for i := range e.Groups[0].Data {
				e.Groups[0].Chunks = append(e.Groups[0].Chunks, i)
			}
			return rest, err
		case string(name) == "groups" && several && e.Groups == nil:
			n := 0
			rest, err = readList(b, func(i int, b []byte) ([]byte, error) {
				if n++; i >= len(layouts) {
					return b, fmt.Errorf("more than %d groups", len(layouts))
				}
				var g EnvelopeGroup
				rest, err := readEnvelopeGroup(b, &layouts[i], chunks, &g)
				e.Groups = append(e.Groups, g)
				return rest, err
			})
			if err == nil && n != len(layouts) {
				err = fmt.Errorf("%d groups, %d are registered", n, len(layouts))
			}
			return rest, err
		}
		return b, errors.New("unknown field, or a field that this registration does not have")
	})
	if err = noRest(rest, err); err == nil {
		switch {
		case version != envelopeVersion:
			err = fmt.Errorf("its version is %d, only %d is known", version, envelopeVersion)
		case seen != 2 || e.Groups == nil:
			err = ErrMissing
		case !several && len(e.Groups[0].Data) != chunks:
			err = fmt.Errorf("%d tensors for %d chunks", len(e.Groups[0].Data), chunks)
		}
	}
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: %w", ErrEnvelope, err)
	}
	return e, nil
}

func readEnvelopeGroup(b []byte, l *kv.Layout, chunks int, g *EnvelopeGroup) ([]byte, error) {
	seen := 0
	rest, err := readMap(b, func(name, b []byte) ([]byte, error) {
		seen++
		switch string(name) {
		case "chunk_indices":
			return intsInto(&g.Chunks, chunks, b)
		case "tensors":
			return readTensors(b, l, chunks, g)
		}
		return b, errors.New("unknown field")
	})
	if err == nil && (seen != 2 || len(g.Chunks) != len(g.Data)) {
		err = fmt.Errorf("%d tensors for %d chunks", len(g.Data), len(g.Chunks))
	}
	for i, c := range g.Chunks {
		if err == nil && (c < 0 || c >= chunks || i > 0 && c <= g.Chunks[i-1]) {
			err = fmt.Errorf("chunk_indices must rise and be below %d", chunks)
		}
	}
	return rest, err
}

// readTensors reads a list of tensors of layout l into g.Data. More than `most` of them are an error.
func readTensors(b []byte, l *kv.Layout, most int, g *EnvelopeGroup) ([]byte, error) {
	want, err := l.Bytes()
	if err != nil {
		return b, err
	}
	return readList(b, func(i int, b []byte) ([]byte, error) {
		if i >= most {
			return b, fmt.Errorf("more than %d tensors", most)
		}
		var dtype, data []byte
		var shape []int
		seen := 0
		rest, err := readMap(b, func(name, b []byte) (rest []byte, err error) {
			seen++
			switch string(name) {
			case "dtype":
				dtype, rest, err = msgp.ReadStringZC(b)
				return rest, err
			case "shape":
				return intsInto(&shape, maxDims, b)
			case "data":
				data, rest, err = msgp.ReadBytesZC(b)
				return rest, err
			}
			return b, errors.New("unknown field")
		})
		switch {
		case err != nil:
		case seen != 3:
			err = ErrMissing
		case string(dtype) != l.DType || !slices.Equal(shape, l.Shape()):
			err = fmt.Errorf("a tensor of %v %.64q, registered is %v %s", shape, dtype, l.Shape(), l.DType)
		case int64(len(data)) != want:
			err = fmt.Errorf("%d bytes for a tensor of %d", len(data), want)
		}
		g.Data = append(g.Data, data)
		return rest, err
	})
}

// EnvelopeBytes returns an upper bound of the bytes that AppendEnvelope appends.
func EnvelopeBytes(layouts []kv.Layout, e *Envelope) (n int64) {
	n = 64
	for i, g := range e.Groups {
		n += 64 + int64(len(g.Chunks))*9
		for _, b := range g.Data {
			n += int64(len(b)) + 64 + int64(len(layouts[i].DType)) + 9*4
		}
	}
	return n
}

// AppendEnvelope appends an envelope to b. Each object has the layout of its group.
func AppendEnvelope(b []byte, layouts []kv.Layout, e *Envelope) []byte {
	b = msgp.AppendMapHeader(b, 2)
	b = appendInt(msgp.AppendString(b, "version"), envelopeVersion)
	if len(layouts) == 1 {
		return appendTensors(b, &layouts[0], e.Groups[0].Data)
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "groups"), uint32(len(e.Groups)))
	for i, g := range e.Groups {
		b = appendInts(msgp.AppendString(msgp.AppendMapHeader(b, 2), "chunk_indices"), g.Chunks)
		b = appendTensors(b, &layouts[i], g.Data)
	}
	return b
}

func appendTensors(b []byte, l *kv.Layout, all [][]byte) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "tensors"), uint32(len(all)))
	for _, data := range all {
		b = msgp.AppendMapHeader(b, 3)
		b = msgp.AppendString(msgp.AppendString(b, "dtype"), l.DType)
		b = appendInts(msgp.AppendString(b, "shape"), l.Shape())
		b = msgp.AppendBytes(msgp.AppendString(b, "data"), data)
	}
	return b
}

// AppendInline appends a msgpack bin value, whose bytes `write` appends; they must be fewer than 4 GiB. Like msgspec it uses the shortest
// header.
func AppendInline(b []byte, write func([]byte) []byte) []byte {
	at := len(b)
	b = write(append(b, 0xc6, 0, 0, 0, 0))
	n := len(b) - at - 5
	switch {
	case n < 1<<8:
		return append(append(b[:at], 0xc4, byte(n)), b[at+5:]...)
	case n < 1<<16:
		return append(append(b[:at], 0xc5, byte(n>>8), byte(n)), b[at+5:]...)
	}
	binary.BigEndian.PutUint32(b[at+1:], uint32(n))
	return b
}

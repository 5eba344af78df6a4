// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"errors"
	"fmt"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

// Generation is a range of lmcache releases whose operations have the same numbers and payloads. No message names its sender's generation.
type Generation uint8

// The generations that are served. Earlier releases can lend their KV only by CUDA IPC.
const (
	Gen046 Generation = iota // 0.4.6: chunks as pickled tensors only
	Gen047                   // 0.4.7: the first with a pool in shared memory
	Gen050                   // 0.5.0 to 0.5.2
	Gen053                   // 0.5.3 and 0.5.4
	Gen055                   // 0.5.5: the first whose keys have num_kv_readers
	Gen056                   // 0.5.6: operations by name
	Gen057                   // 0.5.7: tokens of keys packed, chunk sizes negotiated
	generations
)

// Latest is the generation whose messages this package's encoders and Client send. For a server of 0.5.7 the Client adds the payloads of
// that release.
const Latest = Gen056

// Newest is the newest release that is served.
const Newest = "0.5.7"

var generationNames = [generations]string{"0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5", "0.5.6", "0.5.7"}

// String returns the first release of the generation.
func (g Generation) String() string { return generationNames[g] }

// Generations is a set of generations: those that a client may be of, judged by its messages so far.
type Generations uint8

// AllGenerations is the set of all generations that are served.
const AllGenerations Generations = 1<<generations - 1

// modern is the set of the generations that give the operations of connectors the same numbers.
const modern = 1<<Gen053 | 1<<Gen055 | 1<<Gen056 | 1<<Gen057

// Only returns the set that holds only g.
func Only(g Generation) Generations { return 1 << g }

// Has reports whether g is in the set.
func (s Generations) Has(g Generation) bool { return s>>g&1 != 0 }

// String lists the generations by their first releases.
func (s Generations) String() string {
	var names []string
	for g := range generations {
		if s.Has(g) {
			names = append(names, generationNames[g])
		}
	}
	return strings.Join(names, " or ")
}

// ParseGenerations parses a text of Generations.String. An empty text is an empty set.
func ParseGenerations(text string) (s Generations, err error) {
	if text == "" {
		return 0, nil
	}
next:
	for name := range strings.SplitSeq(text, " or ") {
		for g, known := range generationNames {
			if name == known {
				s |= 1 << g
				continue next
			}
		}
		return 0, fmt.Errorf("lmcache: unknown client generation %q", name)
	}
	return s, nil
}

// Settled reports whether all generations of the set give the operations of connectors the same numbers. A message is then read by its
// number alone.
func (s Generations) Settled() bool { return s != 0 && (s&^modern == 0 || s&(s-1) == 0) }

// operation is a row of the table of operations.
type operation struct {
	op       Op
	name     string             // on the wire since 0.5.6
	since    Generation         // first generation with the operation if the operation has only a name; 0: Gen056
	ids      [generations]uint8 // the operation's number in each generation; 0: the generation does not have the operation
	payloads string             // one letter for each frame, see fits; "*": any frames, for an operation that is always refused
	older    map[Generation]string
	unsent   Generation // clients of generations before this one have the operation, but no release of them sends it
}

// operations is the table of all operations. The letters of payloads: i integer, o integer or nil, n number, y bool, s string, b bytes, l
// list, m map, h map or nil, w key of a worker, k key of a scheduler, which names no worker.
//
// Sources: the enumerations and protocol definitions of the lmcache packages
// 0.4.6, 0.4.7, 0.5.0, 0.5.2 to 0.5.6, 0.5.7rc2. 0.5.7 numbers as 0.5.6 does. CacheBlend's operations are refused; of
// early generations they are left out.
var operations = []operation{
	//                                                    0.4.6 0.4.7 0.5.0 0.5.3 0.5.5 0.5.6
	{op: OpRegisterKVCache, name: "register_kv_cache", ids: ids(1, 1, 1, 1, 1, 1), payloads: "ilsishl", older: before(Gen047, "ilsish")},
	{op: OpUnregisterKVCache, name: "unregister_kv_cache", ids: ids(2, 2, 2, 2, 2, 2), payloads: "i"},
	{op: OpRegisterQCache, name: "register_q_cache", ids: ids(0, 0, 0, 3, 3, 3), payloads: "*"},
	{op: OpUnregisterQCache, name: "unregister_q_cache", ids: ids(0, 0, 0, 4, 4, 4), payloads: "*"},
	{op: OpStoreQ, name: "store_q", ids: ids(0, 0, 0, 5, 5, 5), payloads: "*"},
	{op: OpStore, name: "store", ids: ids(3, 3, 3, 6, 6, 6), payloads: "wilb"},
	{op: OpRetrieve, name: "retrieve", ids: ids(4, 4, 4, 7, 7, 7), payloads: "wilbi"},
	{op: OpLookup, name: "lookup", ids: ids(5, 5, 5, 8, 8, 8), payloads: "ki"},
	{op: OpQueryPrefetchStatus, name: "query_prefetch_status", ids: ids(6, 6, 6, 9, 9, 9), payloads: "s"},
	{op: OpWaitPrefetchStatus, name: "wait_prefetch_status", ids: ids(0, 0, 7, 10, 10, 10), payloads: "sn"},
	{op: OpQueryLookupHits, name: "query_prefetch_lookup_hits", ids: ids(7, 7, 8, 11, 11, 0), payloads: "s", unsent: Gen056},
	{op: OpFreeLookupLocks, name: "free_lookup_locks", ids: ids(8, 8, 9, 12, 12, 12), payloads: "kil", older: before(Gen057, "ki")},
	{op: OpEndSession, name: "end_session", ids: ids(9, 9, 10, 13, 13, 13), payloads: "s"},
	{op: OpRegisterEngineDriven, name: "register_kv_cache_engine_driven_context", ids: ids(10, 10, 11, 14, 14, 14), payloads: "m"},
	{op: OpUnregisterEngineDriven, name: "unregister_kv_cache_engine_driven_context", ids: ids(0, 11, 12, 15, 15, 15), payloads: "i"},
	{op: OpPrepareStore, name: "prepare_store", ids: ids(11, 12, 13, 16, 16, 16), payloads: "wil", older: before(Gen057, "wi")},
	{op: OpCommitStore, name: "commit_store", ids: ids(12, 13, 14, 17, 17, 17), payloads: "wib"},
	{op: OpPrepareRetrieve, name: "prepare_retrieve", ids: ids(13, 14, 15, 18, 18, 18), payloads: "wi"},
	{op: OpCommitRetrieve, name: "commit_retrieve", ids: ids(14, 15, 16, 19, 19, 19), payloads: "wi"},
	{op: OpClear, name: "clear", ids: ids(15, 16, 17, 20, 20, 20), payloads: "y", older: before(Gen056, ""), unsent: Gen055},
	{op: OpGetChunkSize, name: "get_chunk_size", ids: ids(16, 17, 18, 21, 21, 21)},
	{op: OpPing, name: "ping", ids: ids(17, 18, 19, 22, 22, 22), payloads: "o", older: before(Gen050, "")},
	{op: OpReportBlockAllocation, name: "report_block_allocation", ids: ids(18, 19, 20, 23, 23, 23), payloads: "isl"},
	{op: OpNoop, name: "noop", ids: ids(19, 20, 21, 24, 24, 24), unsent: Gen053},
	{op: OpCBRegisterRope, name: "cb_register_rope", ids: ids(0, 0, 0, 0, 25, 25), payloads: "*"},
	{op: OpCBUnregisterRope, name: "cb_unregister_rope", ids: ids(0, 0, 0, 0, 26, 26), payloads: "*"},
	{op: OpCBRetrievePreComputed, name: "cb_retrieve_pre_computed", ids: ids(0, 0, 0, 0, 27, 27), payloads: "*"},
	{op: OpCBUnifiedLookup, name: "cb_unified_lookup", ids: ids(0, 0, 0, 0, 28, 28), payloads: "*"},
	{op: OpP2PLookupAndLock, name: "p2p_lookup_and_lock", ids: ids(0, 0, 34, 37, 29, 29), payloads: "lm"},
	{op: OpP2PQueryLookupResults, name: "p2p_query_lookup_results", ids: ids(0, 0, 35, 38, 30, 30), payloads: "i"},
	{op: OpP2PUnlockObjects, name: "p2p_unlock_objects", ids: ids(0, 0, 36, 39, 31, 31), payloads: "l"},
	{op: OpGetExperimental, name: "get_experimental", ids: ids(0, 0, 0, 40, 32, 32)},
	{op: OpCBProtocolHandshake, name: "cb_protocol_handshake", ids: ids(0, 0, 0, 0, 33, 33), payloads: "*"},
	{op: OpCBReorderPlan, name: "cb_reorder_plan", payloads: "*"},
	{op: OpSubscribeKVEvents, name: "subscribe_kv_events", payloads: "isii"},
	{op: OpServerModuleCall, name: "server_module_call", payloads: "m"},
	{op: OpNegotiateChunkSize, name: "negotiate_chunk_size", since: Gen057, payloads: "i"},
	{op: OpServerModuleAffinityCall, name: "server_module_affinity_call", since: Gen057, payloads: "m"},
}

// early names the releases without a path for CPU tensors. The map's key is the number of get_chunk_size, the first call of every client,
// in these releases.
var early = map[int64]string{7: "0.3.11 to 0.3.13", 8: "0.3.14 to 0.3.15", 10: "0.4.1 to 0.4.2", 11: "0.4.3 to 0.4.5"}

// ids returns the numbers of an operation in each generation, from those of 0.4.6 to 0.5.6. 0.5.7 has the numbers of 0.5.6.
func ids(n ...uint8) [generations]uint8 { return [generations]uint8(append(n, n[Gen056])) }

// before returns a map that gives `payloads` to each generation before g.
func before(g Generation, payloads string) map[Generation]string {
	m := make(map[Generation]string)
	for o := range g {
		m[o] = payloads
	}
	return m
}

// payloadsOf returns the payload letters of the operation in generation g.
func (o *operation) payloadsOf(g Generation) string {
	if p, ok := o.older[g]; ok {
		return p
	}
	return o.payloads
}

// maxID is the largest number of an operation that is looked up. A message with a larger one is of no generation.
const maxID = 40

// index finds the rows of the table of operations: by Op, by name, and by generation and number.
type index struct {
	byOp   [256]*operation
	takes  [256][generations]int // numbers of payloads that an operation (by Op) takes in each generation
	byID   [generations][maxID + 1]*operation
	byName map[string]Op
}

var rows = func() *index {
	x := &index{byName: make(map[string]Op)}
	for i := range operations {
		o := &operations[i]
		x.byOp[o.op] = o
		for g := range generations {
			x.takes[o.op][g] = len(o.payloadsOf(g))
		}
		if o.op != OpQueryLookupHits { // retired before operations had names
			x.byName[o.name] = o.op
		}
		for g, id := range o.ids {
			if id > 0 {
				x.byID[g][id] = o
			}
		}
	}
	return x
}()

// ErrPayloads means that a request has the wrong number of payload frames.
var ErrPayloads = errors.New("lmcache: wrong number of payload frames")

// CheckPayloads returns an error that wraps ErrPayloads unless a client of one of the generations sends the operation with n payload
// frames.
func (s Generations) CheckPayloads(op Op, n int) error {
	o := rows.byOp[op]
	if o == nil || o.payloads == "*" {
		return nil
	}
	if s&modern != 0 { // several generations share the numbers: the payloads show the release
		s |= modern
	}
	for g := range generations {
		if s.Has(g) && rows.takes[op][g] == n {
			return nil
		}
	}
	if op == OpClear && n == 0 { // a client may leave the default out
		return nil
	}
	return fmt.Errorf("%w: %s takes %d, got %d", ErrPayloads, op, len(o.payloads), n)
}

// Reading is one meaning of a message: an operation, and the generations in which the message means it.
type Reading struct {
	Op          Op
	Generations Generations
}

// Read returns the readings of a message [uid, operation, payload ...] whose sender is of
// one of the generations: one for each operation that the message can mean, with the
// generations that use that meaning. Nil means that no generation sends such a message.
//
// With a Settled set, Read looks only at the operation's number; decoders check the
// payloads. Otherwise a reading must fit the number and the types of the payloads.
func (s Generations) Read(m [][]byte, into []Reading) ([]Reading, error) {
	switch msgp.NextType(m[1]) {
	case msgp.StrType:
		name, rest, err := msgp.ReadStringZC(m[1])
		if err != nil || len(rest) != 0 {
			return nil, fmt.Errorf("operation frame: %w", errOr(err, ErrTrailing))
		}
		op, ok := rows.byName[string(name)]
		named := namedBy(op)
		if !ok || s&modern == 0 {
			return nil, nil
		}
		if s&named != 0 {
			named &= s
		}
		return append(into, Reading{op, named}), nil
	case msgp.IntType, msgp.UintType:
		id, rest, err := readInt(m[1])
		if err != nil || len(rest) != 0 {
			return nil, fmt.Errorf("operation frame: %w", errOr(err, ErrTrailing))
		}
		if id < 1 || id > maxID {
			return nil, nil
		}
		return s.readNumber(int(id), m, into), nil
	}
	return nil, errors.New("operation frame: neither an integer nor a string")
}

// namedBy returns the generations whose clients call an operation by its name.
func namedBy(op Op) (s Generations) {
	if o := rows.byOp[op]; o != nil {
		for g := max(o.since, Gen056); g < generations; g++ {
			s |= 1 << g
		}
	}
	return s
}

func (s Generations) readNumber(id int, m [][]byte, into []Reading) []Reading {
	settled := s.Settled()
	var key keyForm
	asks := false
	for g := range generations {
		if !s.Has(g) {
			continue
		}
		o := rows.byID[g][id]
		if o == nil || !settled && (g < o.unsent || !o.fits(g, m[2:], &key)) {
			continue
		}
		asks = asks || o.op == OpGetChunkSize
		into = addReading(into, o.op, g)
	}
	if asks && len(into) > 1 {
		return firstCall(into, m[0])
	}
	return into
}

func addReading(into []Reading, op Op, g Generation) []Reading {
	for i := range into {
		if into[i].Op == op {
			into[i].Generations |= 1 << g
			return into
		}
	}
	return append(into, Reading{op, 1 << g})
}

// firstCall decides between get_chunk_size and other operations without payloads, by the uid. Every client counts its requests from 0. Its
// first request, and no later one, is get_chunk_size.
func firstCall(readings []Reading, uid []byte) []Reading {
	first := IsFirst(uid)
	n := 0
	for _, r := range readings {
		if (r.Op == OpGetChunkSize) == first {
			readings[n] = r
			n++
		}
	}
	return readings[:n]
}

// IsFirst reports whether uid is 0, the number of a client's first request.
func IsFirst(uid []byte) bool {
	n, rest, err := readInt(uid)
	return err == nil && len(rest) == 0 && n == 0
}

// fits reports whether the frames are payloads of the operation as clients of generation g send them. It sets *key to the form of the key
// in the first frame, so that further calls need not read it.
func (o *operation) fits(g Generation, frames [][]byte, key *keyForm) bool {
	letters := o.payloadsOf(g)
	if letters == "*" || len(letters) != len(frames) {
		return false
	}
	for i, frame := range frames {
		ok := false
		switch t := msgp.NextType(frame); letters[i] {
		case 'i', 'y':
			ok = isInt(t) || t == msgp.BoolType
		case 'o':
			ok = isInt(t) || t == msgp.NilType
		case 'n':
			ok = isInt(t) || t == msgp.Float64Type
		case 's':
			ok = t == msgp.StrType
		case 'b':
			ok = t == msgp.BinType
		case 'l':
			ok = t == msgp.ArrayType
		case 'm':
			ok = t == msgp.MapType
		case 'h':
			ok = t == msgp.MapType || t == msgp.NilType
		case 'w', 'k':
			if *key == 0 {
				*key = formOf(frame)
			}
			ok = *key&keyValid != 0 && (*key&keyOfWorker != 0) == (letters[i] == 'w') && (*key&keyReaders != 0) == (g >= Gen055) && (*key&keyPacked != 0) == (g >= Gen057)
		}
		if !ok {
			return false
		}
	}
	return true
}

func isInt(t msgp.Type) bool { return t == msgp.IntType || t == msgp.UintType }

// keyForm is a set of bits that distinguish the keys of generations, and those of workers and schedulers.
type keyForm uint8

const (
	keySeen keyForm = 1 << iota
	keyValid
	keyOfWorker // worker_id is an integer, not nil
	keyReaders  // it has num_kv_readers
	keyPacked   // it has token_bytes
)

// formOf reads the form of a key. It does not read the tokens.
func formOf(frame []byte) keyForm {
	form, worker := keySeen, false
	rest, err := readMap(frame, func(name, b []byte) ([]byte, error) {
		switch string(name) {
		case "worker_id":
			worker = true
			if msgp.NextType(b) != msgp.NilType {
				form |= keyOfWorker
			}
		case "num_kv_readers":
			form |= keyReaders
		case "token_bytes":
			form |= keyPacked
		}
		return b, nil
	})
	if worker && noRest(rest, err) == nil {
		form |= keyValid
	}
	return form
}

// Early returns the releases without a path for CPU tensors whose first request looks like m, or "" if there are none.
func Early(m [][]byte) string {
	id, rest, err := readInt(m[1])
	if err != nil || len(rest) != 0 || len(m) != 2 {
		return ""
	}
	return early[id]
}

// SameNumbers reports whether one client can be of both sets, or whether both sets have generations of modern, which number their
// operations alike.
func (s Generations) SameNumbers(o Generations) bool {
	return s&o != 0 || s&modern != 0 && o&modern != 0
}

// PickleOnly reports whether a client of the set may be of 0.4.6, which knows no shared memory: its registration has no result, and its
// chunks pass through the socket.
func (s Generations) PickleOnly() bool { return s.Has(Gen046) }

// PingsWithoutID reports whether no client of the set sends its id with a ping.
func (s Generations) PingsWithoutID() bool { return s != 0 && s&^(1<<Gen046|1<<Gen047) == 0 }

// NeedsEvent reports whether every client of the set opens the event handle in each answer about lent KV, also in a negative answer. Such a
// client ends when it gets a negative answer. onCPU says that the client's KV is in CPU memory: then 0.5.3 ignores the event.
func (s Generations) NeedsEvent(onCPU bool) bool {
	opens := Generations(1<<Gen046 | 1<<Gen047 | 1<<Gen050)
	if !onCPU {
		opens |= 1 << Gen053
	}
	return s != 0 && s&^opens == 0
}

// HasKey reports whether the first payload of an operation is a key.
func (o Op) HasKey() bool {
	row := rows.byOp[o]
	return row != nil && row.payloads != "" && (row.payloads[0] == 'w' || row.payloads[0] == 'k')
}

// Names returns the worker instance (0 for none), or the model and world size, that the payloads p of an operation name.
func (o Op) Names(p [][]byte) (instance int64, model []byte, world int) {
	row := rows.byOp[o]
	switch {
	case row == nil || len(p) == 0 || row.payloads == "":
	case row.payloads[:1] == "w" && len(p) > 1:
		instance, _, _ = readInt(p[1])
	case row.payloads[:1] == "i" && o != OpReportBlockAllocation: // that integer is a scheduler's
		instance, _, _ = readInt(p[0])
	case row.payloads[:1] == "k" || row.payloads[:1] == "m":
		_, _ = readMap(p[0], func(name, b []byte) (rest []byte, err error) {
			switch string(name) {
			case "instance_id":
				return intInto(&instance, b)
			case "model_name":
				model, rest, err = msgp.ReadStringZC(b)
				return rest, err
			case "world_size":
				return intInto(&world, b)
			}
			return b, nil
		})
	}
	return instance, model, world
}

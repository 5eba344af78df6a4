// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	kvevent "github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Publisher publishes the records of a Feed in vLLM's format on a PUB socket. On a ROUTER socket it answers subscribers that missed
// messages. Its methods are safe for concurrent use.
//
// A Publisher begins with AllBlocksCleared, as message 0, and the contents of the Feed. Each subscriber that comes later gets the same for
// itself alone. The Publisher begins again for all subscribers when the Feed has dropped a record that was not published yet.
type Publisher struct {
	feed   Feed
	o      PublisherOptions
	log    *slog.Logger
	pub    *zmtp.Pub
	replay *zmtp.Router
	epoch  uint64
	came   chan struct{} // has a value after a client subscribed; capacity 1
	keeps  bool          // keeps messages for replays; set before Run

	mu struct { // taken before the mutex of the Feed
		sync.Mutex
		cursor  uint64 // number of the Feed's record that was published last
		started bool
		alone   bool                // no subscriber existed when records were last read, so none missed what was dropped since
		next    uint64              // sequence of the next message
		history []message           // the last messages, oldest first
		bytes   int                 // sum of their payloads
		topic   []byte              // topic of the last message
		models  map[string]struct{} // models whose chunks readers may know, maxModels at most
		news    []Announcement      // memory of the last read, for reuse
		events  []kvevent.Event
		n       PublisherStats
	}
}

// message is a published message. It never changes.
type message struct {
	topic, payload []byte
	sequence       uint64
	salt           *string // the salt of its chunks; nil: it has no chunks, or no client is limited
}

// PublisherStats are the figures of a Publisher.
type PublisherStats struct {
	Messages    uint64 `counter:"kvasir_kv_event_messages_total" help:"Messages on the KV-event socket, heartbeats included."`
	Replays     uint64 `counter:"kvasir_kv_event_replays_total" help:"Requests for messages from a number on."`
	Snapshots   uint64 `counter:"kvasir_kv_event_snapshots_total" help:"Requests for all that is there."`
	Beginnings  uint64 `counter:"kvasir_kv_event_beginnings_total" help:"Times that a new subscriber was sent all that is there."`
	Restarts    uint64 `counter:"kvasir_kv_event_restarts_total" help:"Times that everything was announced anew: once at the start, and whenever events came faster than they were published."`
	Subscribers int    `gauge:"kvasir_kv_event_subscribers" help:"Connections with a subscription to the KV-event socket."`
	Dropped     uint64 `counter:"kvasir_kv_event_dropped_total" help:"Messages dropped for subscribers that did not keep up."`
}

// NewPublisher returns a Publisher of a Book's chunks. It does not listen yet.
func NewPublisher(book *Book, o PublisherOptions) *Publisher {
	return NewFeedPublisher(bookFeed{book, o.withDefaults().ChunkTokens, o.Tenants != nil}, o)
}

// NewFeedPublisher returns a Publisher of any Feed. It does not listen yet.
func NewFeedPublisher(feed Feed, o PublisherOptions) *Publisher {
	p := &Publisher{feed: feed, o: o.withDefaults(), epoch: uint64(time.Now().UnixNano()), came: make(chan struct{}, 1)}
	p.log, p.mu.models = p.o.Log, make(map[string]struct{})
	p.pub = zmtp.NewPub(zmtp.PubOptions{SendQueueBytes: p.o.QueueBytes, MaxPeers: p.o.MaxSubscribers, GiveWay: true, HeartbeatInterval: 30 * time.Second, Log: p.log, OnSubscribe: p.subscribed, Hold: true, Networks: p.o.Networks, Authentication: p.o.Clients, Identify: p.identify()})
	p.replay = zmtp.NewRouter(p.answer, zmtp.RouterOptions{
		MaxFrameBytes: 64 << 10, MaxMessageBytes: 64 << 10, SendQueueBytes: p.o.QueueBytes, MaxPeers: p.o.MaxSubscribers, GiveWay: true, HeartbeatInterval: 30 * time.Second, Networks: p.o.Networks, Authentication: p.o.Clients, Identify: p.identify(), Log: p.log,
	})
	return p
}

// Listen binds the sockets. An empty replay endpoint means no replay socket. It returns the bound addresses.
func (p *Publisher) Listen(ctx context.Context, events, replay string) (eventsAt, replayAt string, err error) {
	p.feed.Activate() // before anything is announced
	p.keeps = replay != ""
	at, err := p.pub.Listen(ctx, events)
	if err != nil {
		return "", "", err
	}
	if replay == "" {
		return at.String(), "", nil
	}
	other, err := p.replay.Listen(ctx, replay)
	if err != nil {
		return "", "", err
	}
	return at.String(), other.String(), nil
}

func (p *Publisher) subscribed(peer *zmtp.Peer, prefix []byte, on bool) {
	if !on {
		return
	}
	for !p.begin(peer, prefix) {
	}
	select {
	case p.came <- struct{}{}:
	default:
	}
}

// begin sends AllBlocksCleared and all present chunks to a new subscriber, and to no other one. The numbers of these messages are those
// just before the number of the next published message. begin returns false if more was published meanwhile than can be held back for the
// subscriber; the caller must then call it again.
func (p *Publisher) begin(peer *zmtp.Peer, prefix []byte) bool {
	p.feed.Activate()
	p.mu.Lock()
	whole := slices.DeleteFunc(visible(p.snapshotLocked(), p.limitOf(peer)), func(d draft) bool {
		topic := p.o.topic(d.model)
		return !bytes.HasPrefix(topic, prefix) || p.pub.Covered(peer, topic, prefix)
	})
	if model, ok := p.o.modelOf(prefix); ok && len(whole) == 0 {
		whole = []draft{{model: model}} // that model has no chunks
	}
	for p.mu.next < uint64(len(whole)) {
		p.sendLocked(p.mu.topic, nil, nil)
	}
	first := p.mu.next - uint64(len(whole))
	p.pub.DropHeld(peer)
	p.mu.n.Beginnings++
	p.mu.Unlock()
	for i, d := range whole {
		m := p.message(d, first+uint64(i))
		if peer.SendWaiting(m.topic, sequenceFrame(m.sequence), m.payload) != nil {
			return true // the subscriber is gone
		}
	}
	return p.pub.Release(peer)
}

// Run publishes until ctx ends. While there are no subscribers it publishes nothing. The next subscriber, or the next request for a replay,
// gets the records that the Feed still has.
func (p *Publisher) Run(ctx context.Context) {
	p.feed.Activate()
	beat, pause := time.NewTicker(p.o.Heartbeat), time.NewTicker(p.o.Interval)
	defer beat.Stop()
	defer pause.Stop()
	for {
		if p.pub.Subscribers() == 0 {
			select {
			case <-ctx.Done():
				return
			case <-p.came:
			}
			beat.Reset(p.o.Heartbeat)
			continue
		}
		changed := p.feed.Changed()
		if p.publish() {
			beat.Reset(p.o.Heartbeat)
			pause.Reset(p.o.Interval)
			select {
			case <-ctx.Done():
				return
			case <-pause.C:
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-beat.C:
			p.heartbeat()
		}
	}
}

// Close ends the connections and returns after the last goroutine. Run must have returned.
func (p *Publisher) Close() error { return errors.Join(p.pub.Close(), p.replay.Close()) }

// publish publishes all new records. It reports whether there were some.
func (p *Publisher) publish() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.mu.next
	p.catchUpLocked(p.feed.Last())
	return p.mu.next != before
}

// catchUpLocked publishes the records up to number `last`.
func (p *Publisher) catchUpLocked(last uint64) {
	alone := p.mu.alone
	p.mu.alone = p.pub.Subscribers() == 0
	if !p.mu.started {
		p.mu.started = true
		p.restartLocked()
	}
	for p.mu.cursor < last {
		limit := int(min(uint64(p.o.BatchEvents), last-p.mu.cursor))
		news, next, lost := p.feed.Read(p.mu.cursor, limit, p.mu.news[:0])
		if lost {
			if !alone {
				p.log.Warn("KV events came faster than they were published; everything is announced anew")
			}
			p.restartLocked()
			return
		}
		p.mu.cursor = next
		p.newsLocked(news)
		clear(news)
		p.mu.news = news[:0]
	}
}

// newsLocked publishes records, a message for each run of one model.
func (p *Publisher) newsLocked(news []Announcement) {
	for len(news) > 0 {
		n := 1
		for n < len(news) && news[n].Model == news[0].Model && (p.o.Tenants == nil || news[n].Salt == news[0].Salt) {
			n++
		}
		p.introduceLocked(news[0].Model)
		events := p.mu.events[:0]
		for i := range news[:n] {
			events = append(events, news[i].Event)
		}
		p.sendLocked(p.o.topic(news[0].Model), events, &news[0].Salt)
		clear(events)
		p.mu.events = events[:0]
		news = news[n:]
	}
}

// restartLocked makes subscribers forget what they know, and publishes all present chunks.
func (p *Publisher) restartLocked() {
	p.mu.n.Restarts++
	all, last := p.feed.Everything()
	p.mu.cursor = last
	cleared := p.events(draft{})
	sent := false
	for _, m := range models(all) {
		p.mu.models[m] = struct{}{}
	}
	for m := range p.mu.models {
		p.sendLocked(p.o.topic(m), cleared, nil)
		sent = true
	}
	if !sent {
		p.sendLocked(p.o.topic(""), cleared, nil)
	}
	for _, d := range p.drafts(all) {
		p.sendLocked(p.o.topic(d.model), p.events(d), d.salt())
	}
}

// maxModels bounds the models for which introduceLocked sends a message. For further models it sends none.
const maxModels = 1024

// IntroduceModel makes readers forget what they know of a model from an earlier life of the server. Otherwise
// they would keep chunks that are gone, of a model of which this life has none.
func (p *Publisher) IntroduceModel(model string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.introduceLocked(model)
}

// introduceLocked makes AllBlocksCleared the first message about a model: routers then forget what they knew of it.
func (p *Publisher) introduceLocked(model string) {
	if _, known := p.mu.models[model]; known || len(p.mu.models) >= maxModels {
		return
	}
	p.mu.models[model] = struct{}{}
	if p.mu.started { // else the first message of all comes later
		p.sendLocked(p.o.topic(model), p.events(draft{}), nil)
	}
}

// models lists the models of all, in their order.
func models(all Contents) (out []string) {
	for i := range all.Len() {
		if m := all.Model(i); i == 0 || m != out[len(out)-1] {
			out = append(out, m)
		}
	}
	return out
}

// draft is a message that is not encoded yet, about some of a Feed's contents, of one model. An empty draft makes readers forget what they
// know of the model.
type draft struct {
	model    string
	of       Contents
	from, to int
}

// salt returns the cache salt of the draft's chunks; nil for an empty draft.
func (d *draft) salt() *string {
	if d.from == d.to {
		return nil
	}
	salt := d.of.Salt(d.from)
	return &salt
}

// drafts splits contents into drafts, one for each message.
func (p *Publisher) drafts(all Contents) (out []draft) {
	for from, to := 0, 0; from < all.Len(); from = to {
		model, salt := all.Model(from), all.Salt(from)
		for to++; to < min(all.Len(), from+p.o.BatchEvents) && all.Model(to) == model && (p.o.Tenants == nil || all.Salt(to) == salt); {
			to++
		}
		out = append(out, draft{model, all, from, to})
	}
	return out
}

func (p *Publisher) events(d draft) (out []kvevent.Event) {
	if d.from == d.to {
		return []kvevent.Event{{Kind: kvevent.Cleared, Group: -1}}
	}
	for i := d.from; i < d.to; i++ {
		out = append(out, d.of.Event(i))
	}
	return out
}

// heartbeat sends a message without events, so that subscribers notice what they missed.
func (p *Publisher) heartbeat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sendLocked(p.mu.topic, nil, nil)
}

// eventBytes is about how many bytes an event takes in addition to its tokens and salt.
const eventBytes = 240

func (p *Publisher) payload(events []kvevent.Event) []byte {
	batch := kvevent.Batch{Time: float64(time.Now().UnixMicro()) / 1e6, Events: events, Rank: -1, Epoch: p.epoch}
	size := 64
	for i := range events {
		size += eventBytes + len(events[i].Salt) + len(events[i].Encoded)
	}
	return p.o.Encoding.Append(make([]byte, 0, size), &batch)
}

// sendLocked publishes one message. `of` is the cache salt of the chunks that the message names: a client that may not see this salt gets a
// message without events instead. nil is for messages that name no chunks, such as heartbeats: all clients get them.
func (p *Publisher) sendLocked(topic []byte, events []kvevent.Event, of *string) {
	m := message{topic: topic, payload: p.payload(events), sequence: p.mu.next}
	if of != nil && p.o.Tenants != nil {
		salt := *of // a copy: the message does not keep the contents that it came from
		m.salt = &salt
	}
	p.mu.next++
	p.mu.n.Messages++
	p.mu.topic = topic
	p.keepLocked(m)
	if m.salt == nil {
		p.pub.Publish(m.topic, sequenceFrame(m.sequence), m.payload)
		return
	}
	other := p.withoutEvents(m)
	p.pub.PublishTo(func(peer *zmtp.Peer) bool { return m.allows(p.limitOf(peer)) },
		[][]byte{m.topic, sequenceFrame(m.sequence), m.payload}, [][]byte{other.topic, sequenceFrame(other.sequence), other.payload})
}

// keepLocked keeps a message for replays, if there is a replay socket. Beyond Options.Replay messages or ReplayBytes it drops the oldest
// ones.
func (p *Publisher) keepLocked(m message) {
	if !p.keeps {
		return
	}
	if spare := cap(m.payload) - len(m.payload); spare > len(m.payload)/8 { // payload sizes its memory for larger events
		m.payload = bytes.Clone(m.payload)
	}
	p.mu.history = append(p.mu.history, m)
	p.mu.bytes += len(m.payload)
	for len(p.mu.history) > p.o.Replay || p.mu.bytes > p.o.ReplayBytes && len(p.mu.history) > 1 {
		p.mu.bytes -= len(p.mu.history[0].payload)
		p.mu.history[0] = message{}
		p.mu.history = p.mu.history[1:]
	}
}

func sequenceFrame(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// endFrame is the sequence of the message that ends a replay.
var endFrame = bytes.Repeat([]byte{0xff}, 8)

// snapshotRequest asks for all present chunks. It stands in the place of a number.
const snapshotRequest = "snapshot"

// answer answers a request of the replay socket: an empty frame, then a sequence number, big-endian, or "snapshot".
func (p *Publisher) answer(peer *zmtp.Peer, m zmtp.Message) {
	if len(m) != 2 {
		return
	}
	delimiter, limit := bytes.Clone(m[0]), p.limitOf(peer)
	send := func(m message) bool {
		return peer.SendWaiting(delimiter, m.topic, sequenceFrame(m.sequence), m.payload) == nil
	}
	var messages iter.Seq[message]
	if string(m[1]) == snapshotRequest {
		messages = p.snapshot(limit)
	} else {
		messages = p.messagesFrom(number(m[1]), limit)
	}
	for m := range messages {
		if !m.allows(limit) {
			m = p.withoutEvents(m)
		}
		if !send(m) {
			return
		}
	}
	_ = peer.SendWaiting(delimiter, nil, endFrame, nil)
}

// number reads a big-endian number of any length.
func number(b []byte) uint64 {
	b = bytes.TrimLeft(b, "\x00")
	if len(b) > 8 {
		return ^uint64(0)
	}
	var full [8]byte
	copy(full[8-len(b):], b)
	return binary.BigEndian.Uint64(full[:])
}

// messagesFrom returns the messages from number start on, without a gap, for a client with that limit. It returns none if the first of them
// is no longer kept. For number 0 it then returns as many messages as were published, at most maxCompacted, if they can contain all present
// chunks.
func (p *Publisher) messagesFrom(start uint64, limit *auth.Limit) iter.Seq[message] {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.n.Replays++
	if p.pub.Subscribers() == 0 || !p.mu.started { // Run publishes nothing then
		p.catchUpLocked(p.feed.Last())
	}
	switch oldest := p.mu.next - uint64(len(p.mu.history)); {
	case start >= p.mu.next:
	case start >= oldest:
		return slices.Values(slices.Clone(p.mu.history[start-oldest:]))
	case start == 0 && p.mu.next <= maxCompacted:
		return p.compactedLocked(limit)
	}
	return noMessages
}

func noMessages(func(message) bool) {}

// maxCompacted bounds the messages that are made for a replay from number 0. If more were published, such a replay has no messages.
const maxCompacted = 1 << 18

// compactedLocked returns a message for each number that was published. Together they contain all present chunks, each as many events as
// fit; the last ones are empty.
func (p *Publisher) compactedLocked(limit *auth.Limit) iter.Seq[message] {
	whole := visible(p.snapshotLocked(), limit)
	n, topic := p.mu.next, p.mu.topic
	if uint64(len(whole)) > n {
		return noMessages // more messages are needed than there are numbers: a snapshot can have them
	}
	return func(yield func(message) bool) {
		for i, d := range whole {
			if !yield(p.message(d, uint64(i))) {
				return
			}
		}
		empty := message{topic: topic, payload: p.payload(nil)}
		for empty.sequence = uint64(len(whole)); empty.sequence < n; empty.sequence++ {
			if !yield(empty) {
				return
			}
		}
	}
}

// snapshot returns messages with all present chunks. All have the number of the next message that is published: a reader applies that
// message, and those after it, on top of them. Each is made when its reader takes it.
func (p *Publisher) snapshot(limit *auth.Limit) iter.Seq[message] {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.n.Snapshots++
	whole, next := visible(p.snapshotLocked(), limit), p.mu.next
	return func(yield func(message) bool) {
		for _, d := range whole {
			if !yield(p.message(d, next)) {
				return
			}
		}
	}
}

func (p *Publisher) message(d draft, sequence uint64) message {
	return message{topic: p.o.topic(d.model), payload: p.payload(p.events(d)), sequence: sequence}
}

// snapshotLocked returns all present chunks as drafts whose contents do not change. Until messages are made of them, they take no more
// memory than what the Feed gives them.
func (p *Publisher) snapshotLocked() (out []draft) {
	all, last := p.feed.Everything()
	p.catchUpLocked(last)
	for p.mu.cursor != last { // everything was announced anew meanwhile
		all, last = p.feed.Everything()
		p.catchUpLocked(last)
	}
	of := models(all)
	for m := range p.mu.models {
		of = append(of, m)
	}
	slices.Sort(of)
	of = slices.Compact(of)
	if len(of) == 0 {
		of = []string{""}
	}
	for _, m := range of {
		out = append(out, draft{model: m})
	}
	return append(out, p.drafts(all)...)
}

// Stats returns the figures.
func (p *Publisher) Stats() PublisherStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.mu.n
	s.Subscribers, s.Dropped = p.pub.Subscribers(), p.pub.Dropped()
	return s
}

// topic returns the topic of a model's messages.
func (o *PublisherOptions) topic(model string) []byte {
	return []byte(strings.ReplaceAll(o.Topic, ModelInTopic, model))
}

// modelOf returns the model whose topic the prefix is. It reports false if there is none.
func (o *PublisherOptions) modelOf(prefix []byte) (string, bool) {
	before, after, ok := strings.Cut(o.Topic, ModelInTopic)
	model, head := strings.CutPrefix(string(prefix), before)
	model, tail := strings.CutSuffix(model, after)
	return model, ok && head && tail && model != ""
}

// ModelInTopic is the part of Options.Topic that is replaced by the model's name.
const ModelInTopic = "{model}"

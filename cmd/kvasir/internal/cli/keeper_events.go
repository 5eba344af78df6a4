// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cli

import (
	"context"
	"errors"
	"os"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/tier/keeper"
)

// keeperEventFlags configure KV events of a keeper's directories.
type keeperEventFlags struct {
	Events      string `name:"kv-events" help:"Publish KV events in the form of vLLM's own tiers on this ZMQ endpoint, as tcp://10.0.0.5:5557: which blocks the directories have and lose, without tokens." group:"Events" placeholder:"ENDPOINT"`
	EventReplay string `name:"kv-events-replay" help:"Answer subscribers that missed some on this endpoint, as tcp://10.0.0.5:5558." group:"Events" placeholder:"ENDPOINT"`
	EventTopic  string `name:"kv-events-topic" help:"Topic; {model} stands for the model's name. Default: kv@HOST@{model}, of this machine's name." group:"Events" placeholder:"TOPIC"`
	EventHashes string `name:"kv-events-hashes" help:"How events write hashes: int, the last 8 bytes as a number, as vLLM does by default, or bytes, as it does with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0." default:"int" enum:"int,bytes" group:"Events"`
}

const (
	keeperChanges     = 1 << 15 // changes kept for the publisher
	keeperSubscribers = 32      // most subscribers, each of which takes 48 bytes per file until it has got the list of all chunks
)

// check returns an error for flags that contradict each other.
func (f *keeperEventFlags) check(auth *zmqAuthFlags) error {
	var err error
	if f.Events == "" && f.EventReplay != "" {
		err = errors.New("--kv-events-replay is of no use without --kv-events")
	}
	if auth.asks("zmq") {
		err = errors.Join(err, usagef("--zmq-auth zmq=…: the one ZMQ listener of a keeper is events"))
	}
	_, wrong := eventAddresses(f.Events, f.EventReplay)
	return errors.Join(err, wrong)
}

// changes returns how many changes the keeper must keep for the publisher.
func (f *keeperEventFlags) changes() int {
	if f.Events == "" {
		return 0
	}
	return keeperChanges
}

func (f *keeperEventFlags) exposed() (out []exposure) {
	for _, x := range exposedEvents([2]string{"--kv-events", f.Events}, [2]string{"--kv-events-replay", f.EventReplay}) {
		x.risk = "read which blocks the directories have"
		out = append(out, x)
	}
	return out
}

// publisherOptions returns the options of a keeper's publisher on this machine.
func (f *keeperEventFlags) publisherOptions() events.PublisherOptions {
	topic := f.EventTopic
	if topic == "" {
		host, _ := os.Hostname()
		topic = "kv@" + host + "@" + events.ModelInTopic
	}
	return events.PublisherOptions{Topic: topic, Encoding: event.Encoding{IntHashes: f.EventHashes == "int"}, MaxSubscribers: keeperSubscribers}
}

// openEvents publishes the changes of a keeper until stop is called, if the flags ask for that. figures adds the publisher's figures to
// a registry.
func (c *keeperKeepCmd) openEvents(e *env, k *keeper.Keeper, a *access) (figures func(*metrics.Registry), stop func() error, err error) {
	if c.Events == "" {
		return func(*metrics.Registry) {}, func() error { return nil }, nil
	}
	proof, err := c.zmqAuthFlags.open(e.log, a.tokens)
	if err != nil {
		return nil, nil, err
	}
	c.warnClearText(e.log, c.exposed())
	o := c.publisherOptions()
	o.Networks, o.Clients, o.Log = a.networks["events"], proof.of["events"], e.log
	p, err := openPublisher(e, func() *events.Publisher { return events.NewFeedPublisher(keeperFeed{k}, o) }, c.Events, c.EventReplay, o.Topic)
	if err != nil {
		return nil, nil, err
	}
	unwatch := proof.watch(e.log)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	figures = func(r *metrics.Registry) {
		metrics.Add(r, p.Stats)
		proof.addListener(r, "events", a.networks["events"])
	}
	return figures, func() error {
		cancel()
		running.Wait()
		unwatch()
		return p.Close()
	}, nil
}

// keeperFeed lets a publisher of events read the changes of a Keeper.
type keeperFeed struct{ *keeper.Keeper }

// Activate does nothing: a keeper records changes from its start.
func (keeperFeed) Activate() {}

// Last returns the number of the newest change.
func (f keeperFeed) Last() uint64 { return f.LastChange() }

// Read appends to dst, as events, at most `limit` changes after the number `after`, and returns the number of the last of them. The bool is
// true if changes were lost.
func (f keeperFeed) Read(after uint64, limit int, dst []events.Announcement) ([]events.Announcement, uint64, bool) {
	changes, next, lost := f.Changes(after, limit)
	for i := range changes {
		dst = append(dst, events.Announcement{Model: changes[i].Model, Event: chunkEvent(&changes[i].Chunk, changes[i].Removed)})
	}
	return dst, next, lost
}

// Everything returns all chunks, and the number of the newest change.
func (f keeperFeed) Everything() (events.Contents, uint64) {
	all, last := f.Chunks()
	return keeperChunks{all}, last
}

// keeperChunks is the content of the directories at one moment.
type keeperChunks struct{ *keeper.Chunks }

// Salt returns "": the names of files tell no tenant.
func (keeperChunks) Salt(int) string { return "" }

// Event returns the event that announces a chunk.
func (c keeperChunks) Event(i int) event.Event {
	x := c.At(i)
	return chunkEvent(&x, false)
}

// chunkEvent returns the event that vLLM's own tiers send for a block of which they know only the key: without tokens, and with a block
// size of 0.
func chunkEvent(c *keeper.Chunk, removed bool) event.Event {
	e := event.Event{Kind: event.Stored, Hashes: [][]byte{c.Hash}, Medium: event.Storage, Group: c.Group}
	if removed {
		e.Kind = event.Removed
	}
	return e
}

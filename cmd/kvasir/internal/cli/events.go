// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// eventFlags configure KV events: reports of chunks that are stored and removed.
type eventFlags struct {
	EventLog    int     `name:"kv-event-log-size" help:"KV-event records kept for readers; 0 serves no subscribe_kv_events. Nothing is recorded before the first subscription, or without --kv-events." default:"32768" group:"Events" placeholder:"RECORDS"`
	EventMemory mibSize `name:"kv-events-memory" help:"Memory for the tokens of chunks in the pool and the tiers, MiB or with a unit: 32k tokens take 160 KiB. What passes it is not announced; tiers make room first." default:"256" group:"Events" placeholder:"MIB"`
	Events      string  `name:"kv-events" help:"Publish KV events in vLLM's format on this ZMQ endpoint, as tcp://10.0.0.5:5557. Whoever reaches it reads the tokens of all prompts." group:"Events" placeholder:"ENDPOINT"`
	EventReplay string  `name:"kv-events-replay" help:"Answer subscribers that missed some on this endpoint, as tcp://10.0.0.5:5558." group:"Events" placeholder:"ENDPOINT"`
	EventTopic  string  `name:"kv-events-topic" help:"Topic; {model} stands for the model's name. Default: kv@HOST:PORT@{model}, of this machine's name and --port." group:"Events" placeholder:"TOPIC"`
	EventArrays bool    `name:"kv-events-arrays" help:"Write events as arrays, as vLLM before 0.24 did, for readers that do not know maps." group:"Events"`
}

func (f *eventFlags) options() events.Options {
	return events.Options{Records: f.EventLog, TokenBytes: int64(f.EventMemory)}
}

// publisherOptions returns the options of the publisher of a server on that port.
func (f *eventFlags) publisherOptions(port, chunkTokens int, log *slog.Logger) events.PublisherOptions {
	topic := f.EventTopic
	if topic == "" {
		host, _ := os.Hostname()
		topic = "kv@" + net.JoinHostPort(host, strconv.Itoa(port)) + "@" + events.ModelInTopic
	}
	return events.PublisherOptions{Topic: topic, ChunkTokens: chunkTokens, Encoding: event.Encoding{Arrays: f.EventArrays}, Log: log}
}

// check returns an error for flags that contradict each other.
func (f *eventFlags) check() error {
	switch {
	case f.Events != "" && f.EventLog == 0:
		return fmt.Errorf("--kv-events needs records: --kv-event-log-size is 0")
	case f.Events == "" && f.EventReplay != "":
		return fmt.Errorf("--kv-events-replay is of no use without --kv-events")
	}
	_, err := f.addresses()
	return err
}

// addresses returns the addresses on which the publisher listens.
func (f *eventFlags) addresses() (out []address, _ error) {
	return eventAddresses(f.Events, f.EventReplay)
}

// eventAddresses returns the addresses on which a publisher with these endpoints listens.
func eventAddresses(events, replay string) (out []address, _ error) {
	for _, a := range []address{{Flag: "--kv-events", Host: events}, {Flag: "--kv-events-replay", Host: replay}} {
		var err error
		if a.Host == "" {
			continue
		}
		if a.Host, a.Port, err = zmtp.HostPort(a.Host); err != nil {
			return nil, fmt.Errorf("%s: %w", a.Flag, err)
		}
		out = append(out, a)
	}
	return out, nil
}

// book returns the Book that records a store's events; nil if the flags ask for none.
func (f *eventFlags) book(st *store.Store, below *tier.Changes) *events.Book {
	if f.EventLog == 0 {
		return nil
	}
	o := f.options()
	o.Tiers = below
	return events.New(st, o)
}

// changes returns the recorder of changes in the tiers; nil if no client can read events.
func (f *eventFlags) changes() *tier.Changes {
	if f.Events == "" {
		return nil
	}
	return tier.NewChanges()
}

// publisher returns a publisher of a Book's records that listens; nil if the flags ask for none.
func (f *eventFlags) publisher(e *env, book *events.Book, o events.PublisherOptions) (p *events.Publisher, err error) {
	if f.Events == "" {
		return nil, nil
	}
	return openPublisher(e, func() *events.Publisher { return events.NewPublisher(book, o) }, f.Events, f.EventReplay, o.Topic)
}

// openPublisher creates a publisher and makes it listen. It calls create again for each attempt to listen.
func openPublisher(e *env, create func() *events.Publisher, endpoint, replay, topic string) (p *events.Publisher, err error) {
	var at, replayAt string
	if err := takeover.ListenAgain(e.ctx, func(ctx context.Context) (err error) {
		p = create()
		if at, replayAt, err = p.Listen(ctx, endpoint, replay); err != nil {
			_ = p.Close() // nothing was sent
		}
		return err
	}); err != nil {
		return nil, fmt.Errorf("--kv-events, --kv-events-replay: %w", err)
	}
	e.log.Info("publishing KV events", "address", at, "replay", replayAt, "topic", topic)
	return p, nil
}

// exposed returns the network listeners of KV events. A UNIX socket is protected by the mode of its file.
func (f *eventFlags) exposed() []exposure {
	return exposedEvents([2]string{"--kv-events", f.Events}, [2]string{"--kv-events-replay", f.EventReplay})
}

// exposedEvents returns the network listeners of KV events. Each element of all is a flag and the endpoint that it sets.
func exposedEvents(all ...[2]string) (out []exposure) {
	for _, x := range all {
		host, _, err := zmtp.HostPort(x[1])
		if err == nil && !strings.HasPrefix(x[1], "ipc://") {
			out = append(out, exposure{listener: "events", at: x[0] + " " + x[1], host: host, risk: "read the tokens of all prompts"})
		}
	}
	return out
}

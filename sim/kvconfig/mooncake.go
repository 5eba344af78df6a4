// SPDX-License-Identifier: Apache-2.0

package kvconfig

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Mooncake is the configuration of a MooncakeConnector.
type Mooncake struct {
	Role     wire.Role
	EngineID string
	Workers  int // num_workers: pushes at a time to one worker of D; default 10

	// Host is the address that peers dial: VLLM_HOST_IP, or else the address of the interface that leads to the internet.
	Host string
	// BasePort is VLLM_MOONCAKE_BOOTSTRAP_PORT, default 8998. P's own registry listens there if Registry is empty; in 0.13 it is the
	// first port of the side channels.
	BasePort int
	// Registry is where P registers: bootstrap_server_address as http://host:port. Empty means that P has a registry of its own.
	Registry string

	// AbortTimeout is how long P keeps blocks that no D pulls: VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, default 480 s.
	AbortTimeout time.Duration
	// ConnectTimeout limits the wait for registries: VLLM_MOONCAKE_CONNECTOR_TIMEOUT, default 30 s.
	ConnectTimeout time.Duration
}

var mooncakeKeys = []string{"num_workers", "mooncake_protocol", "device_name", "bootstrap_server_address"}

// Mooncake returns the configuration of a MooncakeConnector, from its keys and from the environment; getenv works like os.LookupEnv.
// The error lists everything that is wrong.
func (c *Config) Mooncake(getenv func(string) (string, bool)) (*Mooncake, error) {
	var p problems
	if c.Connector != MooncakeConnector {
		p.add("kv_connector is %s, which is not MooncakeConnector", c.Connector)
	}
	p.unknown(c.extra, "", mooncakeKeys)
	m := &Mooncake{Role: c.Role, EngineID: c.EngineID}
	workers, protocol, device, registry := 10.0, "tcp", "", ""
	p.number(c.extra, "num_workers", 1, 1024, &workers)
	p.text(c.extra, "", "mooncake_protocol", &protocol)
	p.text(c.extra, "", "device_name", &device)
	p.text(c.extra, "", "bootstrap_server_address", &registry)
	m.Workers = int(workers)
	if protocol != "tcp" {
		p.add("mooncake_protocol %.64q: only tcp is supported; give both engines \"mooncake_protocol\":\"tcp\"", protocol)
	}
	if device != "" {
		p.add("device_name %.64q: tcp uses none", device)
	}
	var err error
	if m.Registry, err = registryURL(registry); err != nil {
		p.add("bootstrap_server_address %.64q: %v", registry, err)
	}
	m.BasePort = int(p.env(getenv, "VLLM_MOONCAKE_BOOTSTRAP_PORT", 8998, 1, 65535))
	m.AbortTimeout = seconds(p.env(getenv, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480, 1, 1e6))
	m.ConnectTimeout = seconds(p.env(getenv, "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", 30, 0.001, 1e6))
	if m.Host, err = Host(getenv); err != nil {
		p.add("%v", err)
	}
	if err := p.err(MooncakeConnector); err != nil {
		return nil, err
	}
	return m, nil
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// registryURL turns host:port, or http(s)://host:port, into a URL.
func registryURL(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil || u.RawQuery != "" {
		return "", errors.New("the address must be host:port")
	}
	return u.Scheme + "://" + u.Host, nil
}

// env returns a number from the environment, or value if the variable is unset or empty.
func (p *problems) env(getenv func(string) (string, bool), name string, value, low, high float64) float64 {
	s, ok := getenv(name)
	if s = strings.TrimSpace(s); !ok || s == "" {
		return value
	}
	n, err := strconv.ParseFloat(s, 64)
	if err != nil || n < low || n > high {
		p.add("%s=%.64q: a number from %g to %g is wanted", name, s, low, high)
		return value
	}
	return n
}

// Host returns the address at which other hosts reach this one. As in vLLM, that is VLLM_HOST_IP, or else the source address of a route
// to the internet, IPv4 before IPv6; nothing is sent for that. If there is neither, Host returns an error; vLLM then takes 0.0.0.0,
// which no peer can dial.
func Host(getenv func(string) (string, bool)) (string, error) {
	if ip, _ := getenv("VLLM_HOST_IP"); ip != "" {
		return ip, nil
	}
	for _, out := range []struct{ network, addr string }{{"udp4", "8.8.8.8:80"}, {"udp6", "[2001:4860:4860::8888]:80"}} {
		c, err := net.Dial(out.network, out.addr)
		if err != nil {
			continue
		}
		host, _, err := net.SplitHostPort(c.LocalAddr().String())
		_ = c.Close() // nothing was sent
		if err == nil {
			return host, nil
		}
	}
	return "", fmt.Errorf("this host's address is not known: set VLLM_HOST_IP to the one that the other engines dial")
}

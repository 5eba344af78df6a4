// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
)

const (
	maxBytes = 1 << 40                      // largest number of bytes in options
	maxCount = 1 << 24                      // largest number of other things in options
	forever  = time.Duration(math.MaxInt64) // largest time in options: it is not limited
)

// Validate reports every field that cannot be used, as options.Errors.
func (o RouterOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "MaxFrameBytes", o.MaxFrameBytes, 0, maxBytes)
	options.Within(&c, "MaxFrames", o.MaxFrames, 0, maxCount)
	options.Within(&c, "MaxFirstBytes", o.MaxFirstBytes, 0, maxBytes)
	options.Within(&c, "MaxMessageBytes", o.MaxMessageBytes, 0, maxBytes)
	options.Within(&c, "MaxPeers", o.MaxPeers, 0, maxCount)
	options.Within(&c, "SendQueueBytes", o.SendQueueBytes, 0, maxBytes)
	options.Within(&c, "MaxUnsentBytes", o.MaxUnsentBytes, 0, maxBytes)
	options.Within(&c, "MaxReceiveBytes", o.MaxReceiveBytes, 0, maxBytes)
	options.Within(&c, "HandshakeTimeout", o.HandshakeTimeout, 0, forever)
	options.Within(&c, "WriteTimeout", o.WriteTimeout, 0, forever)
	options.Within(&c, "ReceiveTimeout", o.ReceiveTimeout, 0, forever)
	options.Within(&c, "IdleTimeout", o.IdleTimeout, 0, forever)
	options.Within(&c, "HeartbeatInterval", o.HeartbeatInterval, 0, forever)
	options.Within(&c, "HeartbeatTimeout", o.HeartbeatTimeout, 0, forever)
	options.Within(&c, "LargeBytes", o.LargeBytes, 0, maxBytes)
	c.That(o.Curve == nil || o.Plain == nil, "Plain", "is set together with Curve: a socket uses one mechanism")
	return c.Err()
}

// Validate reports every field that cannot be used, as options.Errors.
func (o DealerOptions) Validate() error {
	var c options.Checks
	c.That(len(o.Identity) <= 255, "Identity", "has %d bytes, at most 255 can be sent", len(o.Identity))
	c.That(o.Curve == nil || o.Plain == nil, "Plain", "is set together with Curve: a socket uses one mechanism")
	c.That(o.Plain == nil || len(o.Plain.User) <= 255 && len(o.Plain.Password) <= 255, "Plain", "has a user or password above 255 bytes")
	options.Within(&c, "MaxFrameBytes", o.MaxFrameBytes, 0, maxBytes)
	options.Within(&c, "MaxFrames", o.MaxFrames, 0, maxCount)
	options.Within(&c, "MaxMessageBytes", o.MaxMessageBytes, 0, maxBytes)
	options.Within(&c, "SendQueueBytes", o.SendQueueBytes, 0, maxBytes)
	options.Within(&c, "ConnectTimeout", o.ConnectTimeout, 0, forever)
	options.Within(&c, "HandshakeTimeout", o.HandshakeTimeout, 0, forever)
	options.Within(&c, "WriteTimeout", o.WriteTimeout, 0, forever)
	options.Within(&c, "IdleTimeout", o.IdleTimeout, 0, forever)
	options.Within(&c, "HeartbeatInterval", o.HeartbeatInterval, 0, forever)
	options.Within(&c, "HeartbeatTimeout", o.HeartbeatTimeout, 0, forever)
	return c.Err()
}

// Validate reports every field that cannot be used, as options.Errors.
func (o PubOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "MaxPeers", o.MaxPeers, 0, maxCount)
	options.Within(&c, "SendQueueBytes", o.SendQueueBytes, 0, maxBytes)
	options.Within(&c, "MaxUnsentBytes", o.MaxUnsentBytes, 0, maxBytes)
	options.Within(&c, "MaxSubscriptions", o.MaxSubscriptions, 0, maxCount)
	options.Within(&c, "MaxPrefixBytes", o.MaxPrefixBytes, 0, maxCommandBytes)
	c.That(o.Curve == nil || o.Plain == nil, "Plain", "is set together with Curve: a socket uses one mechanism")
	options.Within(&c, "HandshakeTimeout", o.HandshakeTimeout, 0, forever)
	options.Within(&c, "WriteTimeout", o.WriteTimeout, 0, forever)
	options.Within(&c, "HeartbeatInterval", o.HeartbeatInterval, 0, forever)
	options.Within(&c, "HeartbeatTimeout", o.HeartbeatTimeout, 0, forever)
	return c.Err()
}

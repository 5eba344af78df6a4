// SPDX-License-Identifier: Apache-2.0

// Package tiering is the traffic between the pool and the tier below it: lookups that ask the tier (Probe), loads and checks at the start
// of a server (Warm, Recheck), writes (WriteBack), and the calls themselves (Guard). Rates says whether a load is faster than computing.
package tiering

// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package zmtp

// On systems other than Unix, net.Conn reads connections, and the writer
// goroutine writes them: newPeer leaves Peer.raw nil.
const haveRaw = false

func (p *Peer) onReadable(uintptr) bool { panic("BUG: no raw reads here") }
func (p *Peer) onWritable(uintptr) bool { panic("BUG: no raw writes here") }

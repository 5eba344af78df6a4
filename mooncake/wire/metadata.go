// SPDX-License-Identifier: Apache-2.0

package wire

// Metadata is what a scheduler sends to its workers at one engine step.
type Metadata struct {
	Pulls []PullMeta // for D's workers
	Sends []SendMeta // for P's workers

	// Aborted are requests that ended during their pull. D's workers may give the pull up; they must report it in any case.
	Aborted []string

	// NotProcessed are the ids of transfers that P will not send (in 0.13, request ids), sorted. Workers may not know them. Workers
	// must handle Sends first.
	NotProcessed []string
}

// PullMeta is a pull that D's workers shall start.
type PullMeta struct {
	RequestID string
	// Blocks are the blocks to fill, one list per transferred group. Without blocks, the pull only makes P free its own, and workers
	// report nothing about it.
	Blocks [][]int

	TransferID, EngineID, BootstrapAddr string

	Host string // 0.13 only: P's side channel
	Port int    // 0.13 only: of TP rank 0
}

// SendMeta is a transfer that D will pull from P's workers.
type SendMeta struct {
	RequestID  string
	TransferID string // in 0.13, the request id
	// Blocks are the blocks to send, one list per transferred group. nil announces a transfer whose blocks are not computed yet. A
	// worker may get the blocks without such an announcement.
	Blocks [][]int
}

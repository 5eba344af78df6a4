// SPDX-License-Identifier: Apache-2.0

package arch

// limitRows maps the beginning of a row in docs/limits.md to the bounds of the code that it states.
var limitRows = map[string]string{
	"frame; message; frames": "zmtp.o.MaxFrameBytes zmtp.o.MaxMessageBytes zmtp.o.MaxFrames",
	"unfinished message | ":  "zmtp.o.ReceiveTimeout",
	"unfinished messages;":   "zmtp.o.MaxReceiveBytes zmtp.o.MaxUnsentBytes",
	"connections | 4,096":    "zmtp.o.MaxPeers",
	"request uid":            "server.maxUID",
	"messages held until":    "server.maxHeldTime server.maxHeldMessages server.maxHeldBytes server.maxHeldBytesOfOne server.maxHeldBytesInAll",
	"unsent replies":         "zmtp.o.SendQueueBytes zmtp.o.WriteTimeout",
	"handshake":              "zmtp.o.HandshakeTimeout",
	"tokens of a request":    "lmcache.MaxTokens",
	"model name; request id": "lmcache.maxModelBytes lmcache.MaxRequestBytes lmcache.maxNameBytes",
	"ids that ping":          "server/workers.maxUnknown",
	"connections whose":      "server/workers.maxClients server/workers.maxTries",
	"subscribers of":         "server/events.o.MaxSubscribers server/events.o.QueueBytes zmtp.o.MaxSubscriptions zmtp.o.MaxPrefixBytes",
	"ranges that":            "lmcache.maxSpans lmcache.MaxObjectKeys lmcache.MaxKVEvents",
	"streams of KV events":   "server.maxStreams",
	"messages kept back":     "zmtp.maxHeld server/events.maxModels",
	"note of generations":    "tier.MaxNote tier/generation.maxFile tier/generation.maxModels",
	"lines of log":           "internal/safelog.MaxText",

	"registered workers":       "server.o.MaxInstances",
	"silent worker":            "server.o.WorkerReap server.o.RegistrationGrace",
	"chunk sizes whose":        "server.maxSizes server.maxMisfits",
	"workers that left":        "server/workers.maxDeparted server/workers.maxPages server/workers.maxLooks",
	"layers; KV groups":        "lmcache.maxLayers lmcache.maxGroups lmcache.maxDims",
	"segments of a worker":     "server/lent.maxSegments",
	"segments of departed":     "server/lent.maxLeftovers",
	"transfers in progress":    "store.o.MaxHolds store.o.Quarantine",
	"commits that are":         "store/hold.MaxDebts",
	"note of registrations":    "store/pool.MaxNote",
	"sessions":                 "store/lease.o.MaxSessions store/lease.o.Idle",
	"leases of a session":      "store/lease.o.MaxLeases",
	"slots pinned":             "store/lease.o.MaxPins",
	"objects of a lookup":      "store.maxLookup",
	"pending lookups":          "store.maxPending",
	"requests that wait for a": "server.maxWaits server.maxWaitFor",
	"token memo":               "server.o.MemoBytes",
	"tier socket: a frame":     "tier/vllm.MaxFrame tier/vllm.MaxHello tier/vllm.MaxKeys tier/vllm.MaxRequest tier/vllm.MaxEngineID tier/vllm.MaxModelName",
	"tier socket: engines":     "server/offload.o.MaxEngines tier/vllm.MaxGroups server/offload.o.MaxLent server/offload.o.MaxStores server/offload.maxLeft",
	"tier socket: tenants":     "server/offload.maxTenants",
	"lookups of other nodes":   "server.maxPeerLookups server.maxPeerKeys lmcache.MaxObjectKeys",

	"chunks in the pool":      "store/pool.maxRecords",
	"chunks that wait for a":  "store.maxDueChecksums store.maxCloseSums",
	"quotas; namespaces":      "store/tenant.MaxQuotas store/tenant.maxOwners",
	"TTLs of tenants":         "store/tenant.MaxQuotas store/tenant.MaxPins store/tenant.MaxPinLife",
	"settings of tenants":     "store/tenant.MaxTerms store/tenant.maxTermsFile",
	"reads from tiers":        "store.maxLoads",
	"objects that a tier fai": "store/tiering.maxFailed",
	"objects that a tier did": "tier.o.Remember",
	"requests whose prompts":  "store.maxPrompts",
	"prompts remembered from": "store.maxNamedPrompts",
	"what `--warm` reads":     "store/tiering.maxWarmObjects",
	"Redis: an answer":        "internal/resp.maxText internal/resp.maxItems internal/resp.maxDepth",
	"Redis: a call":           "tier/redis.o.Timeout tier/redis.o.DialTimeout tier/redis.o.Pause",
	"Redis: connections":      "tier/redis.o.Workers tier/redis.o.Lookups tier/redis.maxServers tier/redis.maxMoves",
	"S3: an answer":           "tier/s3.maxDocument tier/s3.o.Workers tier/s3.o.Lookups tier/s3.o.Tries",

	"objects that went":       "store.o.Ghosts",
	"lookups that found less": "store/miss.MaxEnded",
	"names of a chunk":        "store/miss.maxOthers store/miss.maxLookedFor",
	"pairs of model":          "server/usage.MaxPairs server/usage.MaxLoads",
	"tags with figures":       "server/usage.MaxTags lmcache.MaxTags lmcache.MaxTagBytes",
	"namespaces with a known": "tier.maxNames",
	"reasons of refused":      "server/explain.MaxRefusals server/explain.MaxTimelines server/explain.MaxSpans",
	"slow requests":           "server.maxSlowRequests",

	"connections; head":    "internal/httpserver.MaxConns",
	"body of `POST":        "server/admin.maxBody",
	"`/cache/pins`":        "server/admin.maxPinTokens server/admin.maxPinPage server/admin.maxDeleteBody",
	"`/cache/objects`":     "server/admin.maxPageSize server/admin.maxDelete server/admin.maxDeleteBody",
	"`/cache/prefetches`":  "server/admin.maxPrefetchTokens server/admin.maxPrefetchBody",
	"checksums of blocks":  "server/admin.maxChecksumBlocks server/admin.maxChecksumBody",
	"prefetches known":     "server/admin.maxPrefetches",
	"bodies with lists":    "server/admin.maxListBodies",
	"listeners of `/live`": "server/admin.maxListeners store/pool.maxMapped server/admin.maxTenantHours",

	"prompts that relays have":   "proxy/prefix.maxRelayedPrompts",
	"KV blocks of an engine":     "proxy/blocks.o.MaxBlocks proxy/blocks.maxLate proxy/blocks.o.ReplayTimeout proxy.maxTokenizing",
	"requests that wait for the": "proxy/limits.maxAsks proxy/limits.o.Timeout proxy/limits.o.Pause",
	"engines that one":           "proxy.maxFound",
	"responses whose":            "proxy.maxResponses proxy.maxResponseID",
	"events of split":            "proxy.maxHeld proxy.maxJoined proxy.maxEvent proxy.maxWhole proxy.maxError",
	"models whose turns":         "proxy.maxTurns",
	"models with figures":        "proxy.maxModels",
	"memory of requests":         "proxy.o.BodyMemory",
	"requests, queue":            "proxy.o.MaxBody proxy.o.BodyTimeout",
	"registry: workers":          "mooncake/bootstrap.o.MaxWorkers mooncake/bootstrap.maxBodyBytes mooncake/bootstrap.o.MaxConns mooncake/bootstrap.o.MaxWaiters mooncake/bootstrap.o.MaxProbes",

	"directories of ranks":                    "tier/keeper.maxRanks",
	"`config.json`":                           "tier/keeper.maxConfigBytes",
	"subscribers of `--kv-events`; beginning": "tier/keeper.maxModels",
	"processes that ask":                      "tier/keeper.maxHelpers",
	"threads whose jobs":                      "tier/keeper.maxJobs",
	"notes and checksums":                     "tier/keeper.maxNotes",
}

// elsewhere maps bounds without a row to the reason.
var elsewhere = map[string]string{
	"bounds one text, field or answer; nothing is kept": "internal/httpserver.maxHead internal/safelog.maxStack lmcache.MaxKVReaders lmcache.MaxTTL lmcache.maxTTLText lmcache.maxID lmcache.maxObjectGroups lmcache.maxReason " +
		"lmcache.maxShmNameBytes lmcache.maxTimeout lmcache.maxUnread lmcache.maxUnreadBytes mooncake/bootstrap.maxAddrBytes mooncake/bootstrap.maxEngineIDBytes " +
		"mooncake/bootstrap.maxHeader mooncake/bootstrap.maxLease mooncake/bootstrap.maxSize mooncake/bootstrap.o.MaxWait proxy.maxAbort proxy.maxAbortTime proxy.maxInfoTime proxy.maxOpening proxy.maxRequests proxy.maxRoom server.maxSamples server.maxSlowID server/lent.maxPage server/lent.maxStride " +
		"server/admin.maxExplained server/admin.maxModelName server/admin.maxSaltRunes server/admin.maxSkipDepth server/explain.maxModelName server/explain.maxRequestID tier.maxMixed " +
		"server/admin.maxPoolOwners server/admin.maxTimes store/pool.maxMapCells store/pool.MaxOwners zmtp.maxCommandBytes zmtp.maxHeader zmtp.maxIdentity zmtp.maxPingContext zmtp.maxPrefix zmtp.maxProperties",
	"bounds a file of the operator, or an option": "mooncake/bootstrap.maxLimit mooncake/bootstrap.maxStateBytes server.MaxPickleBytes server/admin.maxKeyFile store/pool.MaxBytes store/tenant.MaxTTL " +
		"server.MaxRekeyRate tier.MaxTiers zmtp.maxBytes zmtp.maxClientName zmtp.maxClients zmtp.maxClientsFile zmtp.maxCount zmtp.maxKeyFile",
	"is an option or a bound with a row of another page, as docs/operate/bootstrap.md": "mooncake/bootstrap.maxDirectoryBytes mooncake/bootstrap.maxProbesPerEngine mooncake/bootstrap.maxStates " +
		"proxy.o.MaxInFlight proxy.o.MaxPerEngine proxy.o.MaxPrompts proxy.o.MaxQueue proxy.maxPrefilled proxy.maxTokenized",
	"bounds a step of the server's own work": "internal/safelog.maxPlaces proxy.maxFailures proxy.maxFrees proxy.maxPause proxy.maxWatched proxy/limits.maxBatch server/events.maxCompacted server/events.maxQuiet " +
		"server/events.maxStrayObjects server/events.maxStrays store.maxTransfer store.mostFreed store/lease.maxOthers store/pool.maxFormer store/pool.maxNear store/pool.maxProvided " +
		"store/pool.maxRegions store/tiering.maxComputing store/tiering.maxSlow store/tiering.maxWriteTries store/tiering.mostStat tier/disk.maxChooserKeys tier/disk.mostReadmit " +
		"tier/disk.maxSeals tier/disk.mostTouched tier/generation.maxBegun tier/generation.maxKnown tier/keeper.mostReserve tier/redis.maxFailures tier/s3.maxRaces tier/s3.maxSaid tier/s3.maxStatFailures zmtp.maxLeaving zmtp.maxVecs",
	"is the largest object of a format": "tier/disk.maxSegment tier/mooncakestore.maxObject tier/redis.maxStripes tier/redis.maxValue tier/s3.maxName tier/s3.maxParts tier/s3.maxUpload",
}

# Kvasir. `make help` lists the targets.

GO ?= go
FUZZTIME ?= 180
SOAK ?= 500
CAP ?= 1
COLD ?= 1
MUTANTS ?= 300
SEED ?= 1
PICTURES ?=
PREVIOUS ?=
MUTATED ?= ./store ./store/pool ./store/lease ./lmcache ./server

.PHONY: have-go help build demo test test-all check interop interop-masters interop-vllm interop-sglang interop-cuda canary entered bench release release-check soak soak-share fuzz mutants page docs site fmt

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 17

have-go:
	@command -v $(GO) >/dev/null || { echo "$(GO) is not installed: install Go 1.26, https://go.dev/dl"; exit 1; }

build: have-go ## build bin/kvasir, a static binary
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=auto -ldflags "-s -w" -o bin/kvasir ./cmd/kvasir

demo: build ## play a workload on a server with simulated engines
	bin/kvasir demo

test: have-go ## all tests that need only Go
	CGO_ENABLED=0 GO=$(GO) .ci/test.sh ./... -vet=off -p 4 -timeout 600s

test-all: test ## make test, then tests again with invariants, with crash points, and with invariants and the race detector
	GO=$(GO) .ci/instrumented.sh

# Without cgo, as make test: one compilation serves both.
check: export CGO_ENABLED = 0
check: have-go ## format, vet, staticcheck, gocyclo, the generated reference, ruff, govulncheck where reachable
	@bad=$$($(GO) tool gofumpt -l .); test -z "$$bad" || { echo "not formatted (make fmt):"; echo "$$bad"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags invariants ./internal/invariant
	$(GO) vet -tags crashpoints ./store/pool
	$(GO) tool staticcheck ./...
	@complex=$$($(GO) tool gocyclo -over 25 -ignore '_test\.go$$|^interop/' .); test -z "$$complex" || { echo "functions with more than 25 branches:"; echo "$$complex"; exit 1; }
	$(GO) test -count=1 ./internal/arch
	$(GO) run ./internal/tools/docs -check
	@.ci/ruff.sh
	@.ci/vulncheck.sh

docs: have-go ## write docs/reference/commands: flags, routes and metrics of each command, from the code
	$(GO) run ./internal/tools/docs

site: have-go ## make a site of the pages in bin/site: open bin/site/index.html, no server needed
	cd internal/tools/site && $(GO) build -o ../../../bin/make-site .
	bin/make-site -out bin/site

fmt: ## format all Go files
	$(GO) tool gofumpt -w .

release: have-go ## archives, deb, rpm, image, site, lists of modules and checksums of this commit in dist/
	cd internal/tools/release && $(GO) build -o ../../../bin/release .
	bin/release -out dist

release-check: have-go ## build a release in two clones, compare every byte, look into what users get and live with it (half an hour on two cores; COLD=0: without a cold build cache)
	COLD=$(COLD) .ci/release.sh

soak: have-go ## kill processes that write to a disk, and cut the power: SOAK of them; fill a disk of 4 GiB many times (CAP=part of that); send P and D ten times what they can take, for a minute
	SOAK=$(SOAK) CGO_ENABLED=0 $(GO) test -count=1 -timeout 3600s -run 'TestSoak|TestCrashes' ./tier/disk
	CAP=$(CAP) CGO_ENABLED=0 $(GO) test -count=1 -v -timeout 3600s -run TestCap ./tier/disk
	KVASIR_SOAK=60 CGO_ENABLED=0 $(GO) test -count=1 -v -timeout 600s -run TestSoakOverload ./proxy

soak-share: build ## three minutes of interop/soak, as root, as .ci/run has them beside interop (SEED)
	GO=$(GO) SEED=$(SEED) .ci/soak.sh

page: have-go ## click through the admin page in headless Chromium, and measure it; PICTURES=FOLDER takes pictures of the server at $$KVASIR_PAGE
	KVASIR_PAGE_COST=1 KVASIR_PICTURES=$(abspath $(PICTURES)) CGO_ENABLED=0 $(GO) test -count=1 -v -timeout 900s -run TestPage ./server/admin

fuzz: ## fuzz a rotating share of the decoders, FUZZTIME seconds in all
	.ci/fuzz.sh $(FUZZTIME)

mutants: have-go ## change the code at MUTANTS places of the sample SEED; report what no test notices (an hour)
	CGO_ENABLED=0 nice -n 15 $(GO) run ./internal/tools/mutate -seed $(SEED) -n $(MUTANTS) -judges ./server/access,./server/lent,./server/workers,./server/admin,./lmcache/connector $(MUTATED)

interop: build ## run the real peers against this build, three parts at a time (makes Python environments; PART=one of them)
	interop/run.sh $(PART)

interop-masters: build ## the parts of make interop over a Mooncake Store, with its releases 0.3.7, 0.3.11, 0.3.12 and 0.3.14
	interop/run.sh $(foreach r,0.3.7 0.3.11 0.3.12 0.3.14,cluster@$(r) tier@$(r) store-engine@$(r))

interop-vllm: build ## run real vLLM engines against this build (34 GB, minutes; PART=parts of LMCache alone, PD=parts of P/D alone)
	[ -n "$(PD)" ] || interop/vllm.sh $(PART)
	[ -n "$(PART)" ] || interop/mooncake.sh

interop-sglang: build ## run a real SGLang engine against this build (11 GB, 30 minutes; PART=clients, clients57, lmcache, hicache, hicache-two, pages, pages-cpp, pd)
	interop/sglang.sh $(PART)

interop-cuda: build ## the real lmcache client with its KV on a GPU against this build (PART=client, releases, kill9, pinned, declined, figures)
	interop/cuda.sh $(PART)

canary: build ## run newer releases of the real peers than are pinned, each in an environment of its own; PEERS=PACKAGE==RELEASE names some
	interop/canary.sh $(PEERS)

entered: have-go ## which functions of the connectors and of the Mooncake packages commands enter (seven minutes)
	interop/entered.sh

bench: build ## ratios against LMCache, vLLM's coordinator, the C++ engine, routers, vllm bench serve (50 minutes; BENCH=part)
	interop/bench.sh

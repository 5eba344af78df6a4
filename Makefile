# Kvasir. `make help` lists the targets.

GO ?= go
FUZZTIME ?= 180

.PHONY: help build demo test check interop interop-vllm bench fuzz fmt

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

build: ## build bin/kvasir, a static binary
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/kvasir ./cmd/kvasir

demo: build ## play a workload on a server with simulated engines
	bin/kvasir demo

test: ## all tests that need only Go, plain, with the race detector, with invariants
	CGO_ENABLED=0 $(GO) test -p 1 -timeout 300s ./...
	CGO_ENABLED=0 $(GO) test -p 1 -tags invariants -timeout 300s ./...
	CGO_ENABLED=0 $(GO) test -tags crashpoints -timeout 300s ./pool
	scripts/race.sh

check: ## format, vet, staticcheck, govulncheck where reachable
	@bad=$$($(GO) tool gofumpt -l .); test -z "$$bad" || { echo "not formatted (make fmt):"; echo "$$bad"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags invariants ./...
	$(GO) vet -tags crashpoints ./pool
	$(GO) tool staticcheck ./...
	$(GO) test -count=1 -run TestLayers .
	@scripts/vulncheck.sh

fmt: ## format all Go files
	$(GO) tool gofumpt -w .

fuzz: ## fuzz a rotating share of the decoders, FUZZTIME seconds in all
	scripts/fuzz.sh $(FUZZTIME)

interop: build ## run the real peers against this build (makes a Python environment)
	interop/run.sh

interop-vllm: build ## run a real vLLM engine against this build (26 GB, minutes)
	interop/vllm.sh
	interop/mooncake.sh

bench: build ## ratios against LMCache, vLLM's coordinator and registry, the C++ engine (28 minutes; BENCH=part)
	interop/bench.sh

// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"regexp"
	"strings"
)

// foreign says which flags kvasir proxy has instead of a flag of vllm-router, sglang-router (0.3.2) or smg (1.13.0), by its name.
var foreign = map[string]string{
	"api-key":                        "--engine-api-key for the engines' key, --api-keys for those of clients",
	"control-plane-api-keys":         "--admin-port with --admin-token or --token-file",
	"tenant-api-key":                 "--api-keys",
	"tenant-rate-limit-config":       "rate= and concurrent= in the file of --api-keys",
	"ca-cert-paths":                  "--engine-ca",
	"client-cert-path":               "no client certificate for engines",
	"tls-cert-path":                  "--tls-cert",
	"tls-key-path":                   "--tls-key",
	"cors-allowed-origins":           "--allowed-origins",
	"max-concurrent-requests":        "--max-in-flight",
	"rate-limit-tokens-per-second":   "rate= in the file of --api-keys",
	"queue-size":                     "--max-queue",
	"queue-timeout-secs":             "--queue-timeout",
	"request-timeout-secs":           "--answer-timeout, and --first-byte-timeout",
	"stream-body-stall-timeout-secs": "--stall-timeout",
	"sse-keepalive-secs":             "--keep-alive",
	"shutdown-grace-period-secs":     "--drain-timeout",
	"retry-max-retries":              "--attempts, the first one included",
	"disable-retries":                "--attempts 1",
	"max-payload-size":               "--body-memory",
	"enable-trace":                   "--otlp-endpoint",
	"otlp-traces-endpoint":           "--otlp-endpoint",
	"prometheus-port":                "/metrics at --port, or at --admin-port",
	"prometheus-host":                "--admin-host",
	"health-check-port":              "/health at --port",
	"log-json":                       "--log-format json",
	"log-dir":                        "a log on standard error",
	"service-discovery":              "dns+http://NAME:PORT as --prefill, --decode or --engine",
	"selector":                       "dns+http://NAME:PORT as --engine",
	"prefill-selector":               "dns+http://NAME:PORT as --prefill",
	"decode-selector":                "dns+http://NAME:PORT as --decode",
	"cache-threshold":                "--policy prefix_aware, which has no thresholds",
	"balance-abs-threshold":          "--policy prefix_aware, which has no thresholds",
	"balance-rel-threshold":          "--policy prefix_aware, which has no thresholds",
	"model-path":                     "no tokenizer: prompts reach the engines as they are",
	"tokenizer-path":                 "no tokenizer: prompts reach the engines as they are",
	"chat-template":                  "no chat template: prompts reach the engines as they are",
	"tool-call-parser":               "no parser of tools: the engines have one",
	"reasoning-parser":               "no parser of reasoning: the engines have one",
	"worker-startup-timeout-secs":    "no such limit: it may start before its engines",
	"health-check-interval-secs":     "a look at each engine every second",
	"disable-health-check":           "a look at each engine every second",
	"disable-circuit-breaker":        "a pause for engines that fail five times in a row",
}

// instead matches the parser's error about an unknown flag, with the suggestion that may follow.
var instead = regexp.MustCompile(`^unknown flag --([\w-]+)(?:, did you mean "[^"]*"\?)?`)

// Foreign returns the text of a parser's error for the user. If the unknown flag is one of another router, the text names the flags to
// use instead.
func Foreign(text string) string {
	m := instead.FindStringSubmatch(text)
	if m == nil || foreign[strings.TrimPrefix(m[1], "router-")] == "" {
		return text
	}
	return "unknown flag --" + m[1] + ": kvasir proxy has " + foreign[strings.TrimPrefix(m[1], "router-")] + text[len(m[0]):]
}

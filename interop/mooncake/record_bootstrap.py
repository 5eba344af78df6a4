#!/usr/bin/env python3
"""Records what vLLM's own MooncakeBootstrapServer answers, for mooncake/bootstrap/testdata.

    python interop/mooncake/record_bootstrap.py mooncake/bootstrap/testdata/fastapi.jsonl.gz

One line per script: {"name", "steps": [{"method", "path", "headers", "body", "status", "type", "allow",
"location", "answer"}]}; body and answer are base64. Every script begins with an empty registry. The first
line names the versions. Needs vLLM 0.31 or later; no GPU, no engine.
"""

import base64
import gzip
import http.client
import json
import os
import random
import sys
from importlib.metadata import version

sys.dont_write_bytecode = True
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

JSON = {"Content-Type": "application/json"}
GOOD = {"engine_id": "e1", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://10.0.0.7:41233"}


def reg(**kw):
    return ("POST", "/register", JSON, json.dumps({**GOOD, **kw}).encode())


def raw(body, headers=JSON):
    return ("POST", "/register", headers, body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass"))


QUERY = ("GET", "/query", {}, b"")


def field(name, literal):
    """A body whose field is given as JSON text."""
    parts = [json.dumps(k) + ":" + (literal if k == name else json.dumps(v)) for k, v in GOOD.items()]
    return raw("{" + ",".join(parts) + "}")


WORDS = """0 1 -1 7 -0 00 01 1.0 -0.0 1.5 1e0 1e2 1E+2 100e-2 1e-1 0.1e1 1e16 1e15 123456789012345680.0 1e18 9.3e18 1e19 1e22 1e30 1e308 1e309
-1e309 NaN Infinity -Infinity true false null [] {} [0] {"a":1} "0" "1" " 1" "1 " "\\t2\\n" "+1" "-1" "--1" "+-1" "- 1" "1.0" "1.00" "1." ".0"
"1.5" "1e0" "1e2" "" " " "x" "1x" "0x1" "1_000" "_1" "1_" "1__0" "1_0.0" "00" "007" "-0" "-00" "+0" "0.0" "-0.0" "1.0_0" "NaN" "inf" "true" "True"
"\\u0661" "\\uff11" "1\\u00a0" "\\u00a01" "\\u30001" "1\\u0000" "\\ud800" "1\\u200b" 2147483648 9223372036854775807 -9223372036854775808
"9223372036854775807" 1.0000000000000001 4294967296.0 -1.0 9007199254740993 9007199254740993.0
9223372036854775808 "9223372036854775808" 9.223372036854775e18 9.223372036854775807e18 9.223372036854776e18 -9.223372036854775808e18 -9.3e18 "1_.0" "-_1" "+_1" "0_0"
"_.0" "-.0" "-1.0" "1.0.0" "+" "-" "0_7" "1,0" "++1" "-+1" "1-" "+1.0" "." "\\u20281" "1\\u0085" "\\ufeff1" "1\\u001c" "00000000000000000000000000001" """
INTS = [x for line in WORDS.split("\n") for x in line.split(" ") if x]
# literals with a blank inside
INTS += ['"' + "1" * 5000 + '"', '"' + "0" * 4400 + '1"', '"' + "1" * 30 + 'x"', '"1.' + "0" * 200 + '"', '"' + "1_" * 7 + '1"']
INTS += ['" 1"', '"1 "', '" "', '" 1.0 "', '"- 1"', '"1 0"', '" +1 "']
STRINGS = ["0", "1.5", "true", "null", "[]", "{}", '["a"]', '""', '" "', '"é"', '"\\u00e9"', '"\\ud83d\\ude00"', '"😀"', '"\\ud800"', '"\\udc00\\ud800"',
           '"\\n\\t\\b\\f\\r\\"\\\\\\/"', '"\\u0000"', '"\\u007f\\u0080\\u2028\\u2029"', '"<&>"', '"a\\u001fb"', "1e400", "NaN"]
BODIES = [
    "", " ", "\n", "null", " null ", "true", "false", "0", "1.5", "NaN", "Infinity", "-Infinity", '""', '"x"', "[]", "[1,2]", "{}", " {} ", "\t{}\r\n",
    "{", "}", "[", "]", "{]", "[}", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', '{"a":1 "b":2}', "{'a':1}", "{a:1}", '{"a" 1}', '{"a"::1}', "[1,]", "[1 2]", "[,1]",
    '{"a":}', '{"a":nul}', "nul", "tru", "fals", "Na", "Infinit", "-Infinit", "-", "+1", "01", "1.", ".5", "1e", "1e+", "-a", "--1", "1 1", "{} {}", "{}x", '"', '"abc', '"\\', '"\\x"',
    '"\\u"', '"\\u12"', '"\\u123"', '"\\u123', '"\\u123g"', '"\\u12345', '"\\ud83d\\u"', '"\\ud83d\\u12"', '"\\ud83d\\u12zz"', '"\\ud83d\\u12zz  "', '"\\ud83d\\u0041"', '"\\ud83dx"', '"a\nb"', '"a\tb"', '"\x7f"',
    '"\x00"', '{"\n":1}', '{"é":tru}', '"é', '["é",]', '{"a":"\\q"}', "/* c */{}", "{}//", "\ufeff{}", '\ufeff{"a"', "\ufeff", "\u00a0{}", "[1,2,[3,[4,{\"a\":[]}]]]", "[" * 200 + "]" * 200,
    "[" * 200, '{"a":' * 100 + "1" + "}" * 100, "1" * 4000, "1" * 4301, '"' + "1" * 5000 + '"', "-" + "9" * 400, "1e400", "-1e400", "1.7976931348623157e308", "5e-324", "1e-400", "123456789.123456789",
    "0.1", "1e15", "1e16", "1e17", "123456789012345678", "1234567890123456.7", "0.0001", "0.00001", "1e5", "1e-5", "-0.0", "-0", "100000000000000000000", "1e21", "1e22", "1.5e300", "2.5",
    '{"a":1,"a":2}', '{"b":1,"a":2,"b":3}', '{"engine_id":"e","engine_id":5}', '{"\\u0061":1,"a":2}', '{"addr":"x"}', '{"dp_rank":"x","tp_rank":1.5,"pp_rank":null,"addr":1}',
    '{"engine_id":"e","dp_rank":NaN}', '{"zzz":NaN}', '{"zzz":[1e999]}', '{"zzz":"\\ud800"}', '{"zzz":1e22,"y":0.1,"x":-0.0,"w":1E5}', '{"zzz":{"y":[null,true,false,"é<>&\\u2028\\u0001\\u007f"]}}',
    '{"engine_id":"é","dp_rank":"é"}', json.dumps(list(range(40))), json.dumps({str(i): i for i in range(30)}),
]
TYPES = [None, "", "application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/json;charset=latin-1", "application/problem+json", "application/x+json", "application/vnd.api+JSON",
         "text/json", "text/plain", "application/x-www-form-urlencoded", "application/octet-stream", "multipart/form-data; boundary=x", "json", "application", "application/", "/json", "application/json/x",
         " application/json ", "application /json", "application/ json", "application/json ;x", ";application/json", "application/json, text/plain", "text/plain; application/json", "application/jsonx", "application/+json", "*/*"]


def scripts():
    yield "empty", [QUERY]
    yield "life", [QUERY, reg(), QUERY, reg(), QUERY, reg(addr="tcp://10.0.0.7:9"), reg(engine_id="e2"), reg(engine_id="e2", addr="tcp://1.1.1.1:1", tp_rank=5), QUERY,
                   reg(tp_rank=1), QUERY, reg(pp_rank=1, addr="tcp://a:1"), reg(tp_rank=1, pp_rank=1), reg(tp_rank=1, pp_rank=1, addr="other"), QUERY, reg(dp_rank=3, engine_id="e9"), QUERY]
    yield "order", [reg(dp_rank=d, tp_rank=t, pp_rank=p, engine_id=f"e{d}", addr=f"tcp://h:{d}{t}{p}") for d in (5, 0, 3) for t in (2, 0, 11, 1) for p in (1, 0)] + [QUERY]
    yield "refused leaves", [reg(tp_rank=0), reg(tp_rank=0, addr="x"), QUERY, reg(tp_rank=1, engine_id="no"), QUERY, reg(tp_rank="1.0", pp_rank=True, dp_rank=False), QUERY]
    yield "mismatch before duplicate", [reg(), reg(engine_id="other"), reg(engine_id="other", addr="x"), QUERY]
    yield "texts", [reg(engine_id='q"é\\😀\n', addr="tcp://[::1]:5"), reg(engine_id="<&>\u2028\x7f"), reg(engine_id='q"é\\😀\n', addr="é\t"), QUERY]
    yield "empty strings", [reg(engine_id="", addr=""), QUERY, reg(engine_id="", addr=""), reg(engine_id="", addr="a"), QUERY]
    yield "negative", [reg(dp_rank=-1, tp_rank=-2, pp_rank=-3), QUERY, reg(dp_rank=-1, tp_rank=-2, pp_rank=-3, addr="z")]
    yield "unknown keys", [reg(extra=[1, {"x": None}], model_config=3), QUERY]
    yield "minus zero", [field("dp_rank", "-0.0"), field("dp_rank", '"-0"'), field("dp_rank", "-0"), QUERY]
    for name in ("dp_rank", "tp_rank", "pp_rank"):
        for lit in INTS:
            yield f"{name} {lit}", [field(name, lit), QUERY]
    for name in ("engine_id", "addr"):
        for lit in STRINGS:
            yield f"{name} {lit}", [field(name, lit), QUERY]
    for i, b in enumerate(BODIES):
        yield f"body {i}", [raw(b), QUERY]
    for i, b in enumerate([b"\xff", b'"\xff"', b'{"a":"\xc3"}', b"\xed\xa0\x80", b'{"a":"\xed\xa0\x80"}', b'"\xf4\x90\x80\x80"', b'"\xc0\x80"', b'{"engine_id":"\xed\xa0\x80","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"a"}']):
        yield f"bytes {i}", [raw(b), QUERY]
    full = json.dumps(GOOD)
    for t in TYPES:
        h = {} if t is None else {"Content-Type": t}
        yield f"type {t!r}", [raw(full, h), QUERY]
        yield f"type {t!r} bad", [raw(b'{"a"', h), raw(b"", h), raw("é\x01", h), raw(b"\xff", h)]
    for k in GOOD:
        yield f"without {k}", [raw(json.dumps({n: v for n, v in GOOD.items() if n != k})), QUERY]
    for m in ("GET", "PUT", "PATCH", "OPTIONS", "HEAD", "POST", "TRACE"):
        for p in ("/register", "/query", "/", "/nope", "/query/", "/register/", "//query", "/Query", "/query/x", "/query?x=1", "/quer%79", "/query%2f", "/query/?a=b"):
            if (m, p.split("?")[0].rstrip("/")) != ("POST", "/register"):
                yield f"{m} {p}", [(m, p, {}, b"")]
    rnd = random.Random(1)
    seeds = [full, json.dumps({**GOOD, "x": [1, 2.5, "é\\n", {"y": None}]}), '{"a":[true,false,null,NaN,-Infinity,1e5,-0.0,"\\u00e9\\ud83d\\ude00\\\\"],"b":{"c":{}}}']
    for i in range(1500):
        s = list(rnd.choice(seeds))
        for _ in range(rnd.randint(1, 3)):
            at = rnd.randrange(len(s) + 1)
            op = rnd.randrange(4)
            if op == 0 and at < len(s):
                del s[at : at + rnd.randint(1, 4)]
            elif op == 1:
                s.insert(at, rnd.choice(list('{}[]",:\\u0123456789eE+-. \t\n\x01éNIntfa/')))
            elif op == 2 and at < len(s):
                s[at] = rnd.choice(list('{}[]",:\\u01e.-x é'))
            else:
                s = s[:at] if at else s
        yield f"mutant {i}", [raw("".join(s)), QUERY]


def ask(conn, method, path, headers, body):
    conn.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    conn.putheader("Host", "127.0.0.1:8998")
    for k, v in headers.items():
        conn.putheader(k, v)
    if body or method == "POST":
        conn.putheader("Content-Length", str(len(body)))
    conn.endheaders(body)
    return conn.getresponse()


def main():
    import logging

    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_utils

    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", int(os.environ.get("PORT", "18998")))
    server.start()
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").disabled = True
    n = 0
    with gzip.GzipFile(sys.argv[1], "wb", mtime=0) as out:
        head = {p: version(p) for p in ("vllm", "fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn")}
        head["python"] = sys.version.split()[0]
        out.write(json.dumps(head).encode() + b"\n")
        conn = http.client.HTTPConnection("127.0.0.1", server.port)
        for name, steps in scripts():
            server.workers.clear()
            rec = []
            for method, path, headers, body in steps:
                r = ask(conn, method, path, headers, body)
                rec.append({"method": method, "path": path, "headers": headers, "body": base64.b64encode(body).decode(),
                            "status": r.status, "type": r.getheader("content-type"), "allow": r.getheader("allow"),
                            "location": r.getheader("location"), "answer": base64.b64encode(r.read()).decode()})
                n += 1
                conn.close()  # the server ends a connection after some errors
            out.write(json.dumps({"name": name, "steps": rec}, ensure_ascii=True).encode() + b"\n")
    print(head, n, "answers")
    server.shutdown()


if __name__ == "__main__":
    main()

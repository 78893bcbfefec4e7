"""Tables of names in vLLM (0.33 and earlier) and SGLang (0.5): options that set no key, without effect or refused by
remedy (read by `aerie.deploy.config.option_table`; spellings of one option are joined by a slash, without dashes), and
Aerie's names of their kernels, draft methods and parsers (read by `aerie.deploy.config.vllm_values`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Names of options, separated by spaces. flags: without a value. values: with one. lists: with several."""

    flags: str = ""
    values: str = ""
    lists: str = ""


WITHOUT_EFFECT = Names(
    flags="""
    abort-on-priority-when-disabled aggregate-engine-logging allow-credentials allow-deprecated-quantization
    async-scheduling calculate-kv-scales cohere-is-reasoning-model cudagraph-metrics dcp-q-replicate
    dcp-replicate-q-proj debug-cuda-graph delete-ckpt-after-loading disable-aiter-allreduce-fusion-in-decode
    disable-aiter-allreduce-fusion-in-prefill disable-async-output-proc disable-attn-tp-gather
    disable-cascade-attn disable-chunked-mm-input disable-chunked-prefix-cache disable-cuda-graph
    disable-cuda-graph-padding disable-custom-all-reduce disable-decode-cuda-graph disable-disk-cache
    disable-fast-image-processor disable-fastapi-docs disable-flashinfer disable-flashinfer-autotune
    disable-flashinfer-cutlass-moe-fp4-allgather disable-frontend-multiprocessing
    disable-hybrid-kv-cache-manager disable-hybrid-swa-memory disable-jump-forward disable-log-requests
    disable-log-stats disable-mla disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization
    disable-outlines-disk-cache disable-overlap-schedule disable-piecewise-cuda-graph disable-prefill-cuda-graph
    disable-priority-preemption disable-regex-jump-forward disable-shared-experts-fusion
    disable-tokenizer-batch-decode disable-uvicorn-access-log enable-aiter-allreduce-fusion
    enable-amd-monokernel enable-attn-tp-input-scattered enable-auto-tool-choice enable-batch-sharded-sampling
    enable-beta-spec enable-broadcast-mm-inputs-process enable-cache-report enable-chunked-prefill
    enable-cp-decode-attn-tp enable-cudagraph-gc enable-cumem-allocator enable-dbo
    enable-decoder-swa-bounded-replay enable-deepep-moe enable-deepseek-v4-fp4-indexer enable-dense-mlp-attn-tp
    enable-dp-attention-local-control-broadcast enable-dp-lm-head enable-dsa-cache-layer-split
    enable-dsa-fused-indexer enable-dynamic-batch-tokenizer enable-dynamic-chunking enable-elastic-expert-backup
    enable-encoder-swa-bounded-replay enable-ep-moe enable-ep-weight-filter enable-eplb enable-flashinfer
    enable-flashinfer-allreduce-fusion enable-flashinfer-autotune enable-flashinfer-cutlass-moe
    enable-flashinfer-mla enable-flashinfer-trtllm-moe enable-flexkv enable-forward-pass-metrics
    enable-fp32-lm-head enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope enable-hc-sp
    enable-hierarchical-cache/enable-hicache enable-hisparse enable-http-worker-reuseport
    enable-int8-mamba-checkpoint enable-kv-cache-sharding enable-layernorm-sp enable-layerwise-nvtx-marker
    enable-layerwise-nvtx-tracing enable-lean-attention enable-linear-replayssm enable-linear-replayssm-spec
    enable-linker-mla-dedup enable-lmcache enable-log-deltas enable-log-outputs enable-log-requests
    enable-lora-overlap-loading
    enable-logging-iteration-details enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-megamoe-for-layernorm-sp enable-metrics
    enable-metrics-for-all-schedulers enable-mfu-metrics enable-mixed-chunk enable-mm-embeds
    enable-mm-global-cache enable-mscclpp enable-multi-layer-eagle enable-multimodal
    enable-multimodal-encoder-data-parallel enable-nan-detection enable-nccl-nvls
    enable-nsa-prefill-context-parallel enable-nvidia-megakernel enable-offline-docs enable-p2p-check
    enable-page-major-kv-layout enable-per-request-metrics enable-piecewise-cuda-graph
    enable-precise-embedding-interpolation enable-prefill-cp enable-prefill-delayer enable-prefix-mm-cache
    enable-priority-scheduling enable-profile-cuda-graph enable-prompt-tokens-details enable-reasoning
    enable-request-id-headers enable-request-time-stats-logging enable-response-store enable-scattered-sconv
    enable-server-load-tracking enable-session-radix-cache enable-shared-experts-attn-tp enable-shm-tensor-arena
    enable-single-batch-overlap enable-symm-mem enable-tf32-matmul enable-tokenizer-batch-encode
    enable-tokenizer-info-endpoint enable-torch-compile enable-torch-compile-debug-mode enable-torch-symm-mem
    enable-tp-lm-head-all-to-all enable-trace enable-trace-replay enable-two-batch-overlap
    enable-unified-cache-external-linker enable-unified-memory enable-w4a4-mxfp4-megamoe enable-waterfill
    enforce-disable-flashinfer-allreduce-fusion enforce-shared-experts-fusion engine-use-ray
    exclude-tools-when-tool-choice-none export-metrics-to-file fail-on-environ-validation fully-sharded-loras
    flashinfer-mla-disable-ragged interleave-mm-strings jit-monitor-verbose keep-mm-feature-on-device
    kv-cache-metrics kv-sharing-fast-prefill language-model-only language-only log-error-stack log-requests
    lora-strict-loading
    long-prefill-token-threshold-adaptive mlx-enable-sampling mm-device-do-normalize mm-enable-dp-encoder
    monokernel multi-step-stream-outputs numa-bind pre-warm-nccl prefill-only-disable-kv-cache
    ray-workers-use-nsight schedule-low-priority-values-first scheduler-reserve-full-isl show-time-cost
    specialize-active-lora
    skip-mm-profiling skip-server-warmup sleep-on-idle speculative-dspark-align-verify-tokens-to-graph-tier
    speculative-use-block-verification speculative-use-rejection-sampling stream-output strip-thinking-cache
    swa-bounded-replay triton-attention-reduce-in-fp32 trust-mm-content-hashes use-fp64-gumbel use-ray
    use-replayssm use-tqdm-on-load use-v2-block-manager weight-loader-disable-mmap
    weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints worker-use-ray
    """,
    values="""
    additional-config all2all-backend allowed-local-media-path anthropic-disabled-thinking-effort
    api-server-count/-asc attention-config/-ac batch-notify-size bf16-gemm-backend boundary-reduction c128-page-size
    chat-template-content-format code-revision cohere-format compilation-config/-cc cp-kv-cache-interleave-size
    cp-strategy cpu-distributed-timeout-seconds crash-dump-folder cuda-graph-backend-decode
    cuda-graph-backend-prefill cuda-graph-config cuda-graph-max-bs cuda-graph-max-bs-decode
    cuda-graph-max-bs-prefill cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context/context-bucket
    custom-histogram-buckets data-parallel-backend/-dpb data-parallel-supervisor-port dbo-decode-token-threshold
    dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size debug-tensor-dump-input-file
    debug-tensor-dump-output-folder decode-log-interval deepep-config deepep-dispatcher-output-dtype deepep-mode
    deepep-v2-mode detokenizer-worker-num disable-access-log-for-endpoints dist-timeout distributed-executor-backend
    distributed-timeout-seconds dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s dp-sync-interval dsa-decode-backend dsa-paged-mqa-logits-backend
    dsa-prefill-backend dsa-topk-backend dsa-triton-union dsv4-attn-backend dsv4-prefill-backend dwdp-size
    dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout enable-quant-communications
    engine-info-bootstrap-port engram-config ep-dispatch-algorithm ep-num-redundant-experts eplb-algorithm
    eplb-config eplb-min-rebalancing-utilization-threshold eplb-rebalance-layers-per-chunk
    eplb-rebalance-num-iterations expert-balancedness-report-mode expert-distribution-recorder-buffer-size
    expert-distribution-recorder-mode expert-placement-strategy export-metrics-to-file-dir extra-metric-labels
    fingerprint-mode fingerprint-value flashinfer-a2a-dispatch-type flashinfer-allreduce-fusion-backend
    flashinfer-mxfp4-moe-precision flexkv-config-file forward-pass-metrics-ipc-name forward-pass-metrics-worker-id
    fp4-gemm-runner-backend fp8-gemm-runner-backend fuseep-mode gc-warning-threshold-secs gdn-prefill-backend
    grammar-backend guided-decoding-backend h11-max-header-count h11-max-incomplete-event-size
    hicache-host-memory-fraction hicache-host-memory-mode hicache-io-backend hicache-mem-layout hicache-ratio
    hicache-size hicache-storage-backend hicache-storage-backend-extra-config hicache-storage-prefetch-policy
    hicache-storage-prefetch-retry-max-attempts hicache-storage-prefetch-retry-poll-interval hicache-write-policy
    hisparse-config/hierarchical-sparse-attention-extra-config ignore-patterns image-processor-backend
    init-expert-location int8-mamba-ckpt-size ir-op-priority jit-monitor-mode kda-decode-backend kda-prefill-backend
    kernel-config kv-cache-metrics-sample kv-canary kv-canary-real-data kv-canary-sweep-interval kv-events-config
    limit-mm-data-per-request limit-mm-per-prompt linear-attn-backend linear-attn-decode-backend
    linear-attn-prefill-backend linear-attn-verify-backend linear-backend linear-replayssm-cache-len
    lora-backend lora-drain-wait-threshold lora-dtype lora-eviction-policy lora-extra-vocab-size
    max-lora-chunk-size max-lora-size
    lmcache-config-file load-balance-method load-snapshot-publish-interval log-config-file log-level log-level-http
    log-requests-format log-requests-level logging-config long-prefill-token-threshold mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-full-memory-ratio
    mamba-max-states-per-path mamba-radix-cache-strategy mamba-scheduler-strategy mamba-ssm-cache-dtype
    mamba-ssm-dtype mamba-ssu-algorithm mamba-track-interval max-context-len-to-capture max-cudagraph-capture-size
    max-log-len max-logprobs max-mamba-cache-size max-num-active-seqs max-num-queued-tokens max-num-scheduled-tokens
    max-parallel-loading-workers max-prefill-tokens max-seq-len-to-capture media-io-kwargs
    media-url-max-file-size-mb min-free-slots-delay mm-attention-backend mm-encoder-attn-backend
    mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
    mm-encoder-tp-mode mm-feature-transport mm-global-cache-backend mm-hasher-algorithm mm-io-worker-num
    mm-ipc-gpu-memory-gb mm-preprocess-cache-size-mb mm-process-config mm-processor-cache-gb mm-processor-cache-type
    mm-processor-device mm-processor-kwargs mm-processor-worker-num mm-shm-cache-max-object-size-mb mm-tensor-ipc
    model-loader-extra-config modelexpress-config moe-a2a-backend moe-backend moe-dense-tp-size moe-runner-backend
    monokernel-backend mooncake-ib-device msprobe-dump-config nccl-port nsa-decode-backend nsa-prefill-backend
    num-continuous-decode-steps num-lookahead-slots num-scheduler-steps optimization-level otlp-service-name
    otlp-traces-headers per-request-spec-decode-metrics performance-mode piecewise-cuda-graph-max-tokens
    pp-async-batch-depth pp-max-micro-batch-size preemption-mode prefill-decode-interval
    prefill-decode-interval-min-bs prefill-delayer-max-delay-ms prefill-delayer-max-delay-passes
    prefill-delayer-queue-min-ratio prefill-delayer-token-usage-low-watermark prefill-kv-cache-dequant-dtype
    prefill-max-requests prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo
    prefix-match-unit priority-scheduling-preemption-threshold profiler-config pt-load-map-location
    qsa-indexer-dtype radix-cache-backend radix-eviction-policy radix-eviction-policy-config reasoning-config
    reasoning-parser-plugin renderer-num-workers replayssm-buffer-len retraction-policy safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads schedule-conservativeness schedule-policy
    scheduler-delay-factor scheduler-recv-interval scheduling-policy shared-experts-tp-size
    show-hidden-metrics-for-version shutdown-timeout soft-watchdog-timeout sparse-indexer-topk-backend
    spec-trace-dir speculative-adaptive-config speculative-attention-mode speculative-dflash-block-size
    speculative-max-model-len
    speculative-disable-by-batch-size speculative-domino-candidate-pool-size speculative-draft-attention-backend
    speculative-draft-load-format speculative-draft-model-quantization speculative-draft-sink-size
    speculative-dsa-topk-backend speculative-dspark-block-size speculative-dspark-confidence-sts-path
    speculative-dspark-sps-table-path speculative-enable-w4a4-mxfp4-megamoe speculative-moe-a2a-backend
    speculative-moe-runner-backend speculative-ngram-capacity speculative-ngram-external-corpus-max-tokens
    speculative-ngram-external-corpus-path speculative-ngram-external-sam-budget speculative-ngram-match-type
    speculative-ngram-max-bfs-breadth speculative-ngram-max-trie-depth speculative-ngram-min-bfs-breadth
    sse-keep-alive-interval startup-weight-load-mode stream-interval structured-outputs-config swa-full-tokens-ratio
    swa-prefix-tails swap-space tbo-token-distribution-threshold tokenizer-backend tokenizer-pool-size
    tokenizer-pool-type tokenizer-pool-extra-config max-long-partial-prefills max-num-partial-prefills
    tokenizer-metrics-custom-labels-header tokenizer-worker-num tool-call-parser-plugin tool-parser-plugin
    torch-compile-max-bs trace-modules triton-attention-num-kv-splits triton-attention-split-tile-size ubatch-size
    unified-cache-external-linker-backend unified-cache-external-linker-config uvicorn-log-level
    video-pruning-method video-pruning-rate warmups watchdog-config watchdog-timeout
    weight-loader-prefetch-num-threads weight-version
    """,
    lists="""
    allowed-headers allowed-media-domains allowed-methods bucket-e2e-request-latency bucket-inter-token-latency
    bucket-time-to-first-token collect-detailed-traces cuda-graph-bs cuda-graph-bs-decode cuda-graph-bs-prefill
    cuda-graph-sizes cudagraph-capture-sizes debug-tensor-dump-layers flashinfer-autotune-skip-ops gc-threshold
    generation-tokens-buckets log-requests-target numa-bind-cpus numa-bind-nodes numa-node
    piecewise-cuda-graph-tokens prefill-delayer-forward-passes-buckets prefill-delayer-wait-seconds-buckets
    prompt-tokens-buckets tokenizer-metrics-allowed-custom-labels uvicorn-access-log-exclude-prefixes
    """,
)
# Remedy -> names.
REFUSED: dict[str, Names] = {
    "Aerie reads this from the checkpoint's files: change config.json in a copy of the model's folder": Names(
        flags="disable-sliding-window quantize-and-serve",
        values="""
        decrypted-config-file decrypted-draft-config-file hf-config-path
        model-checksum model-config-parser modelopt-checkpoint-restore-path modelopt-checkpoint-save-path
        modelopt-export-path modelopt-quant quantization-config quantization-param-path rl-quant-profile
        rope-theta tokenizer-revision
        """,
        lists="kv-cache-dtype-skip-layers",
    ),
    "replies have what a request asks for: return_token_ids, logprobs, stream_options (docs/http-api.md)": Names(
        flags="""
        enable-force-include-usage enable-return-aux-hidden-states enable-return-hidden-states
        enable-return-indexer-topk incremental-streaming-output return-input-ids
        return-output-ids return-sampling-mask return-tokens-as-token-ids stream-response-default-include-usage
        tokens-only
        """,
        values="aux-output-config return-hidden-states-mode sampling-mask-max-tokens",
        lists="return-aux-hidden-state-layer-ids",
    ),
    "a server's setting that Aerie lacks: send it with requests (docs/http-api.md), or leave it out": Names(
        flags="""
        allow-auto-truncate constrained-json-disable-any-whitespace enable-prompt-embeds
        enable-streaming-session enable-strict-thinking enable-watermark skip-tokenizer-init trust-request-chat-template
        trust-request-mm-kwargs
        """,
        values="""
        admin-api-key asr-max-buffer-seconds asr-max-concurrent-sessions completion-template
        constrained-json-max-whitespace-cnt constrained-json-whitespace-pattern default-priority-value file-storage-path
        hf-chat-template-name reasoning-effort-map tool-server tool-strict-level watermark watermark-config
        """,
    ),
    "Aerie loads no code of others into the server: leave it out, or do it in a proxy in front": Names(
        values="""
        custom-sigquit-handler io-processor-plugin model-class-overrides scheduler-cls sidecar
        smg-http-sidecar-port/grpc-http-sidecar-port stat-loggers worker-cls worker-extension-cls
        """,
        lists="custom-weight-loader forward-hooks logits-processors middleware sidecar-args",
    ),
    "Aerie generates only: serve embeddings and scores with another server": Names(
        flags="enable-flash-late-interaction enable-mis is-embedding",
        values="pooler-config",
    ),
    "weights stay on the device while the server runs: leave it out": Names(
        flags="""
        checkpoint-engine-wait-weights-before-ready enable-draft-weights-cpu-backup
        enable-nccl-comm-suspend enable-weights-cpu-backup sleep-mode-offload-cudagraph
        """,
        values="""
        sleep-mode-backend weight-cache-mode weight-cache-socket weight-cache-timeout weight-transfer-config
        """,
        lists="sleep-preserve-parameter-names",
    ),
    "one command serves all hosts: `aerie start` on each (docs/clusters.md), then --tensor-parallel N": Names(
        flags="""
        data-parallel-external-lb/-dpe data-parallel-hybrid-lb/-dph data-parallel-multi-port-external-lb/-dpm
        enable-elastic-ep enable-fault-tolerance headless
        """,
        values="""
        base-gpu-id data-parallel-address/-dpa data-parallel-rank/-dpn data-parallel-rpc-port/-dpp
        data-parallel-start-rank/-dpr dist-init-addr/nccl-init-addr elastic-ep-backend elastic-ep-initial-size
        elastic-ep-max-dp-size elastic-ep-scale-timeout ep-join-mode ep-join-rank-offset fault-tolerance-config
        gated-launch-port gpu-id-step load-publish-endpoint master-addr master-port max-ep-size
        """,
        lists="device-ids",
    ),
    "Aerie keeps weights and KV on the device: raise --tensor-parallel-size": Names(
        flags="enable-paged-experts",
        values="""
        cpu-offload-params kt-cpuinfer kt-max-deferred-experts-per-token kt-method kt-num-gpu-experts
        kt-threadpool-count kt-weight-path kv-offloading-backend kv-offloading-size offload-backend offload-group-size
        offload-mode offload-num-in-group offload-params offload-prefetch-step paged-experts-num-resident
        ple-offload-backend ple-offload-dir ple-offload-embedding
        """,
    ),
    "prefill and decode run in one engine: leave it out": Names(
        flags="""
        disaggregation-decode-enable-offload-kvcache disaggregation-decode-enable-radix-cache
        disaggregation-enable-kv-checksum enable-adaptive-dispatch-to-encoder enable-pd-role-switch enable-pdmux
        enable-scale-out encoder-only mm-encoder-only
        remote-instance-weight-loader-start-seed-via-transfer-engine
        """,
        values="""
        decoupled-spec-bind-endpoint decoupled-spec-rank decoupled-spec-role disaggregation-bootstrap-port
        disaggregation-decode-allocation-policy disaggregation-decode-extra-slots
        disaggregation-decode-host-receive-threshold disaggregation-decode-polling-interval
        disaggregation-decode-retraction-backup disaggregation-ib-device disaggregation-mode
        disaggregation-transfer-backend ec-manager-config ec-transfer-config encoder-bootstrap-port
        encoder-transfer-backend kv-transfer-config num-reserved-decode-tokens optimistic-prefill-attempts
        pdmux-config-path remote-instance-weight-loader-backend remote-instance-weight-loader-seed-instance-ip
        remote-instance-weight-loader-seed-instance-service-port sm-group-num
        """,
        lists="""
        decoupled-spec-connect-endpoints encoder-register-urls encoder-urls
        remote-instance-weight-loader-send-weights-group-ports
        """,
    ),
    "Aerie's adapters are of peft's forms, and change layers of text (docs/lora.md): leave it out": Names(
        flags="""
        enable-mixed-moe-lora-format enable-moe-shared-loras enable-tower-connector-lora lora-use-virtual-experts
        """,
        values="default-mm-loras experts-shared-outer-loras max-lora-cls-labels uno-lora-path",
    ),
    "Aerie has no such decoding: leave it out; drafts are chosen with --draft HEAD@REVISION": Names(
        flags="dllm-fdfo",
        values="""
        diffusion-config/-dc dllm-algorithm dllm-algorithm-config rl-on-policy-target speculative-draft-model-revision
        speculative-token-map
        """,
    ),
    "Aerie listens on TCP with HTTP alone: --host 127.0.0.1 --port N": Names(
        flags="grpc-mode smg-grpc-mode",
        values="grpc-port grpc-response-timeout-secs uds",
    ),
    "Aerie speaks plain HTTP: put a proxy with TLS in front": Names(
        flags="enable-http2 enable-ssl-refresh",
        values="""
        http2-initial-connection-window-size http2-max-concurrent-streams ssl-ca-certs ssl-cert-reqs ssl-certfile
        ssl-ciphers ssl-keyfile ssl-keyfile-password
        """,
    ),
    "Aerie answers with text only": Names(
        flags="omni",
        values="deploy-config stage-configs-path",
    ),
}


BACKENDS = {
    "FLASHINFER": "flashinfer",
    "FLASHINFER_MLA": "flashinfer",
    "TRITON_ATTN": "triton",
    "TRITON_MLA": "triton",
    "TRITON": "triton",
    "TORCH_SDPA": "torch",
    "TORCH_NATIVE": "torch",
}
# Aerie chooses its own kernels instead.
OTHER_BACKENDS = """
AITER ASCEND AUTO B12X COMPRESSED CPU_ATTN CPU_MLA CUTEDSL_MLA CUTLASS_MLA CUTLASS_MSA DIFFERENTIAL_FLASH_ATTN DSA DSV4
DUAL_CHUNK_FLASH_ATTN FA FA3 FA4 FLASHINFER_MLA_SPARSE FLASHMLA FLASHMLA_SPARSE FLASH_ATTN FLASH_ATTN_MLA FLEX_ATTENTION
HPC_ATTN HPC_OPS INTEL_AMX INTEL_XPU NSA ROCM_AITER_FA ROCM_AITER_MLA ROCM_AITER_UNIFIED_ATTN ROCM_ATTN TOKENSPEED_MLA
TREE_ATTN TRITON_MSA TRTLLM_MHA TRTLLM_MLA TURBOQUANT WAVE XFORMERS
"""
ALGORITHMS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "FROZEN_KV_MTP": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "NGRAM": "suffix",
}
PARSERS = {
    **{name: name for name in ("hermes", "mistral", "deepseek_v3", "qwen3_coder", "glm45", "kimi_k2", "minimax_m2")},
    **{name: name for name in ("seed_oss", "granite", "gemma4", "phi4_mini", "harmony", "llama3", "pythonic")},
    "response_template": "response_template",
    "deepseek_r1": "think",
    "deepseek_v31": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt_oss": "harmony",
    "kimi": "kimi_k2",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "minimax": "minimax_m2",
    "minimax_append_think": "minimax_m2",
    "minimax_m2_append_think": "minimax_m2",
    "nanbeige": "qwen3_coder",
    "nemotron_3": "think",
    "nemotron_v3": "think",
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "phi4_mini_json": "phi4_mini",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "think",
    "qwen3_thinking": "think",
    "qwen3_xml": "qwen3_coder",
}
# Formats that Aerie looks for in the chat template.
OTHER_PARSERS = """
afmoe apertus apertus2509 auto bailing beam cohere2 cohere_command cohere_command3 cohere_command4 command3 cwm
deepseek_v32 deepseek_v4 deepseek_v41 deepseekv32 deepseekv4 deepseekv41 dots ernie45 ernie_x1 exaone4 exaone_moe
functiongemma gigachat3 gigachat35 granite4 granite_20b_fc granite_thinking granite_thinking_parser hf holo2 hunyuan
hunyuan_a13b hy_v3 hy_v4 hyv3 identity inkling internlm internlm2 interns1 iquest_q1 jamba jan_v3 k2_horizon kimi_k3
laguna lfm2 ling3 longcat mellum mimo minicpm5 minicpm5xml minicpmv minimax_m1 minimax_m3 muse muse_glimmer
musespark1x nano_v3 nemotron_json olmo3 plamo3 poolside_v1 qwen3_json solar_open spark25 step3 step3_5 step3p5
step5 trinity xlam
"""

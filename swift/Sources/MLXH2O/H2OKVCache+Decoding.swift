import MLX

/// A cache's way into fused decoding on a GPU, and out of it.
///
/// Whoever wants to look at the rows, the remainder or the victims asks for ``store``,
/// ``remainder`` or ``victims``, which take them back from the kernels first.
extension H2OKVCache {
    // Query heads of one KV head that a fused step takes at once.
    private static let mostQueryHeads = 32
    // Where somebody reads the cache after every step (as the token iterator of mlx-swift-lm's main
    // branch does), each would wait for the GPU and copy all rows: so often, then no more before the
    // next prompt.
    private static let mostBriefDecodings = 3

    /// Where the rows lie, once the first have come.
    var store: SlotStore? {
        get {
            takeBack()
            return heldStore
        }
        set { heldStore = newValue }
    }

    /// What stays of the evicted.
    var remainder: Remainder? {
        get {
            takeBack()
            return heldRemainder
        }
        set { heldRemainder = newValue }
    }

    /// Slots to overwrite next, `[B, H, evictEvery]`; each run knows how many it has used.
    var victims: MLXArray? {
        get {
            takeBack()
            return heldVictims
        }
        set { heldVictims = newValue }
    }

    /// Have store, remainder and victims here and not with the kernels.
    private func takeBack() {
        guard let decoding else { return }
        self.decoding = nil
        briefDecodings = decoding.steps > 1 ? 0 : briefDecodings + 1
        (heldRemainder, heldVictims) = decoding.end(&heldStore!)
    }

    /// One token in one fused step, or nil where there is none for it; parameters as of
    /// ``attend(queries:keys:values:scale:mask:sinks:)``.
    func decode(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float,
        mask: MLXFast.ScaledDotProductAttentionMaskMode, sinks: MLXArray?
    ) -> MLXArray? {
        guard keys.dim(2) == 1, attended, keys.dtype == values.dtype, packing.recent == nil,
            briefDecodings < Self.mostBriefDecodings, case .none = Mask(mask),
            queries.dim(1) <= Self.mostQueryHeads * keys.dim(1),
            let policy = policy as? any KernelPolicy, let metal = Backend.current.metal,
            metal.canDecode(policy, keyWidth: keys.dim(3), valueWidth: values.dim(3))
        else { return nil }
        start(keys, values)
        yieldToPressure()
        offset += 1
        if heldStore!.runs.contains(where: { $0.length == $0.allocated && $0.length < $0.budget }) {
            store!.reserve(1, like: rows(keys, values, from: offset - 1))
        }
        if decoding == nil { startDecoding(policy, metal) }
        return decoding!.step(
            queries: queries, keys: keys, values: values, scale: scale, sinks: sinks,
            offset: offset, heads: headSteps())
    }

    private func startDecoding(_ policy: any KernelPolicy, _ metal: MetalKernels) {
        let none = MLXArray.zeros(
            [rowTypes!.batch, heldStore!.heads, policy.options.evictEvery], dtype: .int32)
        decoding = GPUDecoding(
            &heldStore!, packing: packing, remainder: heldRemainder!, victims: heldVictims ?? none,
            policy: policy, remembers: remembers, answers: remainderAnswers,
            architecture: metal.architecture)
        // The kernels may write in place only what nobody else holds.
        (heldRemainder, heldVictims) = (nil, nil)
    }

    /// What each KV head does in the next step.
    private func headSteps() -> [HeadStep] {
        var heads: [HeadStep] = []
        for i in heldStore!.runs.indices {
            var run = heldStore!.runs[i], victim = -1
            if run.length < run.budget {
                run.length += 1
            } else {
                victim = policy.options.evictEvery - run.victims
                run.victims -= 1
            }
            let choose = run.length == run.budget && run.victims == 0
            if choose { run.victims = policy.options.evictEvery }
            heldStore!.runs[i] = run
            heads += (0 ..< run.heads).map {
                HeadStep(
                    start: run.start + $0 * run.allocated, length: run.length, victim: victim,
                    recent: policy.recentSlots(run.budget), evicted: evicted(run), choose: choose)
            }
        }
        return heads
    }
}

import MLX

/// Decoding in one fused step on a GPU: overwrite, attend, update; nothing is read back.
///
/// The kernels change a layer's rows in place, in arrays that nothing else has seen
/// (metal/README.md). MLX knows nothing of that, so every kernel that reads slots takes an array that
/// the one before it wrote, and ``end(_:)`` waits for the last of them before it hands the arrays
/// out.
final class GPUDecoder {
    // MLX passes shorter arrays as constants, which kernels cannot write.
    private static let fewestSlots = 8
    // Query heads of one KV head that a fused step takes at once.
    private static let mostQueryHeads = 32

    /// Bytes of the rows.
    let nbytes: Int
    /// Tokens decoded.
    private(set) var steps = 0

    private let architecture: String
    private let options: PolicyOptions
    private let policy: KernelPolicy
    private let remembers: Bool
    private let answers: Bool
    private let frame: FrameArrays?
    private let saturation: MLXArray
    private let fields: Fields
    private let slots: SlotArrays
    /// S, as the layer has it.
    private let count: Int

    /// The kernels for a fused step with these tokens, or nil: nothing else decides.
    static func kernels(for tokens: NewTokens, _ settings: CacheSettings) -> MetalKernels? {
        guard tokens.count == 1, settings.undo == 0, settings.packing.recent == nil,
            tokens.keys.dtype == tokens.values.dtype, case .none = tokens.mask,
            tokens.queries.dim(1) <= mostQueryHeads * tokens.keys.dim(1),
            Tiling.widths.contains(tokens.keys.dim(3)),
            Tiling.widths.contains(tokens.values.dim(3)),
            let metal = Backend.current.metal, KernelPolicy(settings.policy) != nil,
            metal.canWriteInPlace
        else { return nil }
        return metal
    }

    /// A layer lends its rows to the kernels.
    ///
    /// - Parameters:
    ///   - layer: Of settings that ``kernels(for:_:)`` accepts.
    ///   - architecture: The GPU's, by which attention shares out its work.
    init(lent layer: inout Layer, architecture: String) {
        let settings = layer.settings, lent = layer.lend()
        (options, policy) = (settings.policy.options, KernelPolicy(settings.policy)!)
        (remembers, answers) = (settings.remembers, settings.remainderAnswers)
        (frame, saturation) = (layer.frame, layer.saturation)
        self.architecture = architecture
        count = lent["keys"]!.dim(1)
        var bytes = lent.values.reduce(0) { $0 + $1.nbytes }
        // The kernels change these very arrays.
        fields = lent.mapValues(Self.unshared)
        var slots = SlotArrays(
            keys: settings.packing.rows("keys", fields),
            values: settings.packing.rows("values", fields), positions: fields["positions"]!,
            scores: fields["scores"], valueLengths: fields["value_lengths"])
        if options.valueWeighted {
            let norms = sqrt(square(slots.values.dense.float32).sum(axis: -1))
            slots.norms = norms
            bytes += norms.nbytes
        }
        (self.slots, nbytes) = (slots, bytes)
    }

    /// One token: fold, write, attend, accumulate, choose.
    ///
    /// - Parameters:
    ///   - tokens: One for each batch entry, as the model made it: the kernels enter the frame.
    ///   - offset: The next logical position.
    ///   - heads: A plan for each KV head.
    ///   - remainder: Statistics of the evicted.
    ///   - victims: `[B, H, evictEvery]` int32.
    ///   - agedFrom: The position from which ages count.
    /// - Returns: `[B, Hq, 1, Dv]`, and what the remainder and the victims are afterwards.
    func step(
        _ tokens: NewTokens, offset: Int, heads: [HeadPlan], remainder: Remainder,
        victims: MLXArray, agedFrom: Int
    ) -> (output: MLXArray, remainder: Remainder, victims: MLXArray) {
        steps += 1
        let plan = StepPlan(
            offset: offset, slots: slots.keys.shape[1], sink: options.sink,
            evictEvery: options.evictEvery, heads: heads, agedFrom: agedFrom)
        let launches = StepLaunches(plan, slots)
        let (written, folded) = launches.overwrite(
            victims: victims, newKeys: tokens.keys, newValues: tokens.values,
            remainder: remembers ? remainder : nil, frame: frame)
        let remainder = folded ?? remainder
        var means: MLXArray?, worth: MLXArray?
        if plan.chooses && policy.priority.needsDistances {
            means = self.means(launches, written, remainder)
        }
        if plan.chooses && policy.priority == .direction {
            worth = launches.unlikeDirections(after: written)
        }
        let attended = AttentionLaunch(
            AttentionCall(
                queries: tokens.queries.asType(tokens.keys.dtype), keys: slots.keys,
                values: slots.values, scale: tokens.scale, sinks: tokens.sinks),
            remainder: answers && heads.contains { $0.evicted > 0 } ? remainder : nil,
            saturation: saturation, frameScale: frame?.scale, means: means, ranges: plan.ranges,
            export: policy.score == .none ? .logSumExp : .logits, architecture: architecture,
            after: written
        ).run()
        let next = launches.update(
            policy, attended, victims: victims, written: written, means: means, worth: worth)
        // Evaluating the output evaluates all of the step.
        let output = depends(
            input: attended.output.asType(tokens.queries.dtype), dependencies: [next])
        return (output, remainder, next)
    }

    /// Give the rows back.
    func end(_ layer: inout Layer) {
        eval(layer.decodedState)
        layer.takeBack(fields.mapValues { $0.sliced(0 ..< count, axis: 1) })
    }

    /// The mean evicted key, or that of the kept ones while too few were evicted.
    private func means(
        _ launches: StepLaunches, _ written: MLXArray, _ remainder: Remainder
    ) -> MLXArray {
        let few = launches.plan.heads.map { $0.evicted < Terms.fewestForAMean }
        guard few.contains(true) else { return remainder.meanKey }
        let kept = launches.meanKeptKeys(after: written)
        return which(MLXArray(few).column, kept, remainder.meanKey)
    }

    /// The same values in memory of their own: copied where anything else holds them.
    private static func unshared(_ field: MLXArray) -> MLXArray {
        let slots = field.dim(1)
        if slots < fewestSlots {
            return zeroPadded(field, axis: 1, before: 0, after: fewestSlots - slots)
        }
        return which(MLXArray(true), field, MLXArray.zeros([], dtype: field.dtype))
    }

    /// Whether a row that a kernel writes into its input is there for the next reader.
    static func triesToWriteInPlace() -> Bool {
        let head = HeadPlan(
            start: 0, length: 1, victim: -1, recent: 0, evicted: 0, choose: false)
        let plan = StepPlan(offset: 1, slots: 8, sink: 0, evictEvery: 1, heads: [head])
        let keys = MLXArray.zeros([1, 8, 32], dtype: .float32)
        let values = MLXArray.zeros([1, 8, 32], dtype: .float32)
        let positions = MLXArray.zeros([1, 8], dtype: .int32)
        eval(keys, values, positions)
        let slots = SlotArrays(keys: .plain(keys), values: .plain(values), positions: positions)
        let row = MLXArray.ones([1, 1, 1, 32], dtype: .float32)
        let (written, _) = StepLaunches(plan, slots).overwrite(
            victims: MLXArray.zeros([1, 1, 1], dtype: .int32), newKeys: row, newValues: row,
            remainder: nil)
        eval(written)
        return keys[0, 0].sum().item(Float.self) == 32
            && values[0, 0].sum().item(Float.self) == 32
    }
}

import MLX

/// Decoding in one fused step on a GPU: overwrite, attend, update; nothing is read back.
///
/// The kernels change a layer's slots in place, in arrays that nobody else has seen
/// (metal/README.md). MLX knows nothing of that, so every kernel that reads slots takes an array that
/// the one before it wrote, and ``end(_:)`` waits for the last of them before it hands the arrays
/// out.
final class GPUDecoding {
    // MLX passes shorter arrays as constants, which nobody can write.
    private static let fewestSlots = 8

    /// Bytes of all that the kernels hold.
    let nbytes: Int
    /// Tokens decoded.
    private(set) var steps = 0

    private let architecture: String
    private let policy: any Policy
    private let ranking: Ranking
    private let remembers: Bool
    private let answers: Bool
    private let fields: Fields
    private let slots: SlotArrays
    /// S, as the store has it.
    private let count: Int
    private var remainder: Remainder
    private var victims: MLXArray

    /// A layer's arrays go to the kernels.
    ///
    /// - Parameters:
    ///   - store: Slots; its fields are taken out.
    ///   - packing: How its keys and values are stored.
    ///   - remainder: Statistics of the evicted.
    ///   - victims: `[B, H, evictEvery]` int32.
    ///   - policy: One that the kernels can run.
    ///   - remembers: Whether evicted rows are folded into the remainder.
    ///   - answers: Whether it answers queries.
    ///   - architecture: The GPU's, by which attention shares out its work.
    init(
        _ store: inout SlotStore, packing: Packing, remainder: Remainder, victims: MLXArray,
        policy: any KernelPolicy, remembers: Bool, answers: Bool, architecture: String
    ) {
        (self.remainder, self.victims, self.policy) = (remainder, victims, policy)
        (self.remembers, self.answers) = (remembers, answers)
        self.architecture = architecture
        let form = policy.kernelForm, options = policy.options
        ranking = Ranking(
            score: form.score, priority: form.priority, perLayer: options.unit == .layer,
            ageNormalised: options.ageNormalised,
            weights: [form.decay, 1, form.massWeight, -form.ageWeight].map { Float($0) })
        count = store.fields["keys"]!.dim(1)
        var bytes = store.fields.values.reduce(victims.nbytes) { $0 + $1.nbytes }
        if remembers { bytes += remainder.arrays.reduce(0) { $0 + $1.nbytes } }
        // The kernels change these very arrays.
        fields = store.fields.mapValues(Self.own)
        store.fields = [:]
        var slots = SlotArrays(
            keys: packing.rows("keys", fields), values: packing.rows("values", fields),
            positions: fields["positions"]!, scores: fields["scores"])
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
    ///   - queries: `[B, Hq, 1, D]`.
    ///   - keys: `[B, H, 1, D]`, the new key.
    ///   - values: `[B, H, 1, Dv]`, the new value.
    ///   - scale: Factor on q.k.
    ///   - sinks: Attention-sink logits `[Hq]`.
    ///   - offset: The next logical position.
    ///   - heads: One plan for each KV head.
    /// - Returns: `[B, Hq, 1, Dv]`.
    func step(
        queries: MLXArray, keys: MLXArray, values: MLXArray, scale: Float, sinks: MLXArray?,
        offset: Int, heads: [HeadStep]
    ) -> MLXArray {
        steps += 1
        let plan = StepPlan(
            offset: offset, slots: slots.keys.shape[1], sink: policy.options.sink,
            evictEvery: policy.options.evictEvery, heads: heads)
        let launches = StepLaunches(plan, slots)
        let (written, folded) = launches.overwrite(
            victims: victims, newKeys: keys, newValues: values,
            remainder: remembers ? remainder : nil)
        if let folded { remainder = folded }
        var means: MLXArray?, worth: MLXArray?
        if plan.chooses && ranking.priority == .distance { means = self.means(launches, written) }
        if plan.chooses && ranking.priority == .direction {
            worth = launches.unlikeDirections(after: written)
        }
        let attended = AttentionLaunch(
            AttentionOperands(
                queries: queries.asType(keys.dtype), keys: slots.keys, values: slots.values,
                scale: scale, sinks: sinks),
            remainder: answers && heads.contains { $0.evicted > 0 } ? remainder : nil,
            means: means, ranges: plan.ranges,
            export: ranking.score == .none ? .logSumExp : .logits, architecture: architecture,
            after: written
        ).run()
        victims = launches.update(
            ranking, attended, victims: victims, written: written, means: means, worth: worth)
        // Whoever evaluates the output evaluates all of the step.
        return depends(
            input: attended.output.asType(queries.dtype), dependencies: [victims])
    }

    /// What the kernels wrote last; whoever evaluates it evaluates all steps.
    var sideState: [MLXArray] { [victims] + remainder.arrays }

    /// Put the fields back into the store; the remainder and the victims.
    func end(_ store: inout SlotStore) -> (remainder: Remainder, victims: MLXArray) {
        eval(sideState)
        store.fields = fields.mapValues { $0.sliced(0 ..< count, axis: 1) }
        return (remainder, victims)
    }

    /// The mean evicted key, or that of the kept ones while too few were evicted.
    private func means(_ launches: StepLaunches, _ written: MLXArray) -> MLXArray {
        let few = launches.plan.heads.map { $0.evicted < Distinct.fewestForAMean }
        guard few.contains(true) else { return remainder.meanKey }
        let kept = launches.meanKeptKeys(after: written)
        return which(MLXArray(few).column, kept, remainder.meanKey)
    }

    /// The same values in memory of their own: copied unless nobody else holds them.
    private static func own(_ field: MLXArray) -> MLXArray {
        let slots = field.dim(1)
        if slots < fewestSlots {
            return zeroPadded(field, axis: 1, before: 0, after: fewestSlots - slots)
        }
        return which(MLXArray(true), field, MLXArray.zeros([], dtype: field.dtype))
    }

    /// Whether a row that a kernel writes into its input is there for the next reader.
    static func triesToWriteInPlace() -> Bool {
        let head = HeadStep(
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

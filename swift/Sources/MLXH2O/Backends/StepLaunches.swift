import MLX

/// A layer's slots in flat buffers, which the kernels change in place.
struct SlotArrays {
    /// `[B, S, D]`, dense or packed.
    let keys: Rows
    /// `[B, S, Dv]`, likewise.
    let values: Rows
    /// `[B, S]` int16 or int32.
    let positions: MLXArray
    /// `[B, S]` float32, where the policy gathers some.
    var scores: MLXArray?
    /// ||v|| `[B, S]` float32 of the values as they are stored, where the policy weighs by it.
    var norms: MLXArray?
    /// log ||v||^2 `[B, S]` float16 of dense values as they came, where the policy ranks by it.
    var valueLengths: MLXArray?

    /// What is kept of the values' sizes, by the names of the kernels' buffers.
    var ofValues: [String: MLXArray] {
        var arrays: [String: MLXArray] = [:]
        arrays["norms"] = norms
        arrays["value_lengths"] = valueLengths
        return arrays
    }
}

/// Launches of the kernels around attention in a decode step.
struct StepLaunches {
    private static let remainderOut = Remainder.bufferNames.map { $0 + "_out" }
    static let overwrite = KernelLaunch.Interface("overwrite")
    static let keptKeys = KernelLaunch.Interface("kept_keys")
    static let update = KernelLaunch.Interface("update")
    private static let keptKeysSimdgroups = 8
    private static let updateSimdgroups = 16

    let plan: StepPlan
    let slots: SlotArrays
    private let planArray: MLXArray

    init(_ plan: StepPlan, _ slots: SlotArrays) {
        (self.plan, self.slots) = (plan, slots)
        planArray = MLXArray(plan.integers)
    }

    /// Write each head's new row, in place, and fold the row that was there.
    ///
    /// - Parameters:
    ///   - victims: `[B, H, evictEvery]` int32.
    ///   - newKeys: `[B, H, 1, D]`, in the dtype of those held, which pack it if they are packed.
    ///   - newValues: `[B, H, 1, Dv]`, likewise.
    ///   - remainder: Statistics of the evicted, or nil where nothing remembers them.
    ///   - frame: In which keys are stored; new ones come as the model made them.
    /// - Returns: The slots that were written `[B, H]` int32, counted in their heads, and the
    ///   remainder. Any kernel that reads the slots afterwards must take one of these arrays, or
    ///   nothing says that it comes later.
    func overwrite(
        victims: MLXArray, newKeys: MLXArray, newValues: MLXArray, remainder: Remainder?,
        frame: FrameArrays? = nil
    ) -> (written: MLXArray, remainder: Remainder?) {
        let (B, H, D, Dv) = (newKeys.dim(0), newKeys.dim(1), newKeys.dim(3), newValues.dim(3))
        var inputs = [
            "plan": planArray, "victims": victims, "new_keys": newKeys, "new_values": newValues,
            "positions": slots.positions,
        ]
        let rows = [slots.keys.buffers("keys"), slots.values.buffers("values"), slots.ofValues]
        for buffers in rows + [frame?.buffers ?? [:]] { inputs.merge(buffers) { $1 } }
        var outputs: [KernelLaunch.Output] = []
        if let remainder {
            inputs.merge(remainder.buffers) { $1 }
            outputs = zip(Self.remainderOut, remainder.arrays).map {
                .init($0, $1.shape, .float32)
            }
        }
        outputs.append(.init("slots_out", [B, H], .int32))
        let written = KernelLaunch(
            interface: Self.overwrite, inputs: inputs, outputs: outputs,
            template: [("T", slots.keys.dtype), ("D", D), ("DV", Dv)] + slots.keys.packing("K")
                + slots.values.packing("V") + [
                    ("REMEMBERS", remainder != nil), ("NORMS", slots.norms != nil),
                    ("LENGTHS", slots.valueLengths != nil),
                    ("POSITION", slots.positions.dtype), ("FRAME", frame != nil),
                ],
            threadgroups: (1, H, B), threads: KernelLaunch.simdgroup
        ).run()
        let folded = remainder.map { _ in Remainder(Self.remainderOut.map { written[$0]! }) }
        return (written["slots_out"]!, folded)
    }

    /// The mean of each head's keys `[B, H, D]` float32.
    func meanKeptKeys(after written: MLXArray) -> MLXArray {
        keptKeys("means", [slots.keys.shape[0], plan.heads.count, slots.keys.shape[2]], written)
    }

    /// 1 - cos(key, mean direction of its head's keys) `[B, attended slots]` float32.
    func unlikeDirections(after written: MLXArray) -> MLXArray {
        keptKeys("worth", [slots.keys.shape[0], plan.attended], written)
    }

    private func keptKeys(_ wanted: String, _ shape: [Int], _ written: MLXArray) -> MLXArray {
        KernelLaunch(
            interface: Self.keptKeys,
            inputs: ["plan": planArray, "slots": written].merging(slots.keys.buffers("keys")) {
                $1
            },
            outputs: [.init(wanted, shape, .float32)],
            template: [("D", slots.keys.shape[2])] + slots.keys.packing("K") + [
                ("DIRECTIONS", wanted == "worth"), ("SIMDS", Self.keptKeysSimdgroups),
            ],
            threadgroups: (1, plan.heads.count, slots.keys.shape[0]),
            threads: Self.keptKeysSimdgroups * KernelLaunch.simdgroup
        ).run()[wanted]!
    }

    /// Bring the scores up to date, in place, and name the next victims.
    ///
    /// - Parameters:
    ///   - policy: In the kernels' terms.
    ///   - attended: What attention wrote; its logits where the policy accumulates, its distances
    ///     where it ranks by them.
    ///   - victims: `[B, H, evictEvery]` int32; heads that do not choose keep theirs.
    ///   - written: What ``overwrite(victims:newKeys:newValues:remainder:)`` returned.
    ///   - means: `[B, H, D]`, from which the distances were measured.
    ///   - worth: `[B, attended slots]`, for the priority "direction".
    /// - Returns: Victims `[B, H, evictEvery]` int32.
    func update(
        _ policy: KernelPolicy, _ attended: Attended, victims: MLXArray, written: MLXArray,
        means: MLXArray?, worth: MLXArray?
    ) -> MLXArray {
        let (B, H) = (victims.dim(0), victims.dim(1)), lse = attended.logSumExp!
        let scores = policy.score != .none
        var inputs = [
            "plan": planArray, "weights": MLXArray(policy.weights), "victims": victims,
            "lse": lse, "positions": slots.positions, "slots": written,
        ]
        inputs["logits"] = scores ? attended.logits : nil
        inputs["distances"] = worth ?? attended.distances
        inputs["means"] = means
        inputs["scores"] = scores ? slots.scores : nil
        inputs.merge(slots.ofValues) { $1 }
        let priority = plan.chooses ? policy.priority : .age
        var ranges = 0, levels = 0
        if priority == .salience, case .packed(let values) = slots.values {
            inputs["value_scales"] = values.scales
            (ranges, levels) = (values.scales.dim(-1), (1 << values.bits) - 1)
        }
        return KernelLaunch(
            interface: Self.update, inputs: inputs,
            outputs: [.init("victims_out", victims.shape, .int32)],
            template: [
                ("D", slots.keys.shape[2]), ("G", lse.dim(1) / H),
                ("SCORE", policy.score.rawValue), ("PRIORITY", priority.rawValue),
                ("AGE", policy.ageNormalised), ("VALUES", slots.norms != nil),
                ("RANGES", ranges), ("LEVELS", levels),
                ("HEADS", policy.perLayer ? H : 1), ("SIMDS", Self.updateSimdgroups),
            ],
            threadgroups: (1, policy.perLayer ? 1 : H, B),
            threads: Self.updateSimdgroups * KernelLaunch.simdgroup
        ).run()["victims_out"]!
    }
}

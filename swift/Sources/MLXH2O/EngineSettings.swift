import CMLXH2O
import MLX

/// A policy in the engine's terms.
final class EnginePolicy {
    let handle: mlx_h2o_policy

    /// - Throws: ``H2OError/configuration(_:)`` for settings out of range.
    init(_ policy: any H2OPolicy) throws {
        if let own = policy as? H2OPolicies.Own {
            handle = try own.inEngine()
        } else {
            var made = mlx_h2o_policy_new()
            try checkEngine(mlx_h2o_policy_named(&made, policy.name))
            handle = made
        }
        for (name, value) in policy.settings.sorted(by: { $0.key < $1.key }) {
            // (As JSON, a share of 0.0 would be a count of 0.)
            let text = if case .double(let number) = value { "\(number)" } else { value.text }
            try checkEngine(mlx_h2o_policy_set(handle, name, value.string ?? text))
        }
    }

    deinit { mlx_h2o_policy_free(handle) }
}

extension CacheSettings {
    /// Calls with these settings as the engine's options, which hold what they point to only meanwhile.
    ///
    /// - Throws: ``H2OError/configuration(_:)`` for numbers of another number of heads.
    func withEngineOptions<Result>(
        _ plan: SlotPlan, _ body: (mlx_h2o_cache_options) throws -> Result
    ) throws -> Result {
        let heads = plan.budgets.count
        guard saturation.count == 1 || saturation.count == heads else {
            throw H2OError.configuration(
                "saturation has \(saturation.count) numbers for \(heads) KV heads: give one for "
                    + "each, or one for all.")
        }
        guard plan.later.allSatisfy({ $0.budgets.count == heads }) else {
            throw H2OError.configuration(
                "filling has slots for each of \(heads) KV heads; got \(plan.later).")
        }
        var options = mlx_h2o_cache_options_default()
        (options.remainder, options.attending) = (remainderAnswers, attends)
        options.k_bits = Int32(packing.keyBits ?? 0)
        options.v_bits = Int32(packing.valueBits ?? 0)
        options.group_size = Int32(packing.groupSize)
        options.recent_bits = Int32(packing.recentBits ?? 0)
        options.undo = Int32(clamping: undo)
        let frame = frame.map { FrameArrays($0) }
        if let frame {
            (options.frame_centre, options.frame_scale) = (frame.centre.ctx, frame.scale.ctx)
        }
        let saturations =
            saturation.count == heads
            ? saturation : Array(repeating: saturation[0], count: heads)
        let stages = plan.laterNumbers, ropes = rope.map { [$0.inEngine] } ?? []
        options.n_stages = plan.later.count
        return try withExtendedLifetime(frame) {
            try saturations.withUnsafeBufferPointer { saturations in
                try stages.withUnsafeBufferPointer { stages in
                    try ropes.withUnsafeBufferPointer { ropes in
                        options.saturation = saturations.baseAddress
                        options.filling = stages.isEmpty ? nil : stages.baseAddress
                        options.rope = ropes.isEmpty ? nil : ropes.baseAddress
                        return try body(options)
                    }
                }
            }
        }
    }
}

extension H2ORope {
    fileprivate var inEngine: mlx_h2o_rope {
        mlx_h2o_rope(
            size: MemoryLayout<mlx_h2o_rope>.size, dims: Int32(clamping: dimensions), base: base,
            scale: scale, traditional: traditional)
    }
}

import Foundation
import LocalTokenizers
import MLX
import MLXH2O
import MLXLLM
import MLXLMCommon
import Observation

/// The conversation on screen.
@MainActor @Observable
final class Chat {
    struct Message: Identifiable {
        let id = UUID()
        let isUser: Bool
        var text: String
    }

    private(set) var messages: [Message] = []
    private(set) var reply: Task<Void, Never>?
    private(set) var memory: MemoryUse?
    private(set) var tokensPerSecond = 0.0
    private(set) var problem: String?
    private var session: H2OChatSession?
    private let pressure = H2OMemoryPressure()
    private let file = FileManager.default.urls(for: .documentDirectory, in: .userDomainMask)[0]
        .appendingPathComponent("conversation.safetensors")

    /// Load the model from a folder, and the conversation of last time.
    func load(from folder: URL) async {
        Memory.cacheLimit = 64 << 20  // of freed buffers, before the model is loaded
        pressure.observeSystem()
        do {
            let configuration = try H2OConfiguration(budget: .tokens(1024), pressure: pressure)
            await H2OModels.register(configuration)
            let container = try await LLMModelFactory.shared.loadContainer(
                from: folder, using: LocalTokenizers())
            let session = H2OChatSession(
                container, h2o: configuration, instructions: "Be brief.",
                parameters: GenerateParameters(temperature: 0.6, prefillStepSize: 256))
            self.session = session
            guard FileManager.default.fileExists(atPath: file.path) else { return }
            try await session.restore(from: file)
            messages = [Message(isUser: false, text: await session.transcript)]
        } catch {
            problem = error.localizedDescription
        }
    }

    func send(_ text: String) {
        guard let session, reply == nil else { return }
        messages += [Message(isUser: true, text: text), Message(isUser: false, text: "")]
        reply = Task {
            do {
                for try await part in session.streamDetails(to: text) {
                    messages[messages.count - 1].text += part.chunk ?? ""
                    tokensPerSecond = part.info?.tokensPerSecond ?? tokensPerSecond
                }
                // Both wait for the end of a reply that was stopped.
                memory = try await session.withCaches { try MemoryUse($0) }
                try await session.save(to: file)
            } catch {
                problem = error.localizedDescription
            }
            reply = nil
        }
    }

    /// The reply ends with its next token; the conversation goes on from there.
    func stop() { reply?.cancel() }

    /// Begin a new conversation, with whole budgets again.
    func clear() async {
        stop()
        await reply?.value
        await session?.clear()
        pressure.end()
        (messages, memory, problem) = ([], nil, nil)
        try? FileManager.default.removeItem(at: file)
    }
}

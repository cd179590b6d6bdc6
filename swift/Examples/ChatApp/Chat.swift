import ChatEngine
import Foundation
import MLX
import MLXH2O
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
    private(set) var frame: ChatEngine.Frame?
    private(set) var problem: String?
    private(set) var isAnswering = false
    private let pressure = H2OMemoryPressure()
    private var engine: ChatEngine?

    // Buffers that MLX keeps for later; without a limit it keeps as many as the device has room for.
    private static let bufferPool = 64 << 20

    /// Load the model that lies in the app, in the memory of so many tokens.
    func load(tokens: Int = 1024) async {
        Memory.cacheLimit = Self.bufferPool
        // What no longer fits after a warning goes on answering through the remainder; when the system
        // is back to normal, new conversations have their whole budgets again.
        pressure.observeSystem()
        do {
            guard let folder = Bundle.main.url(forResource: "Model", withExtension: nil) else {
                problem = "The app holds no folder called Model."
                return
            }
            engine = try await ChatEngine(
                folder: folder, tokenizers: LocalTokenizers(),
                configuration: H2OConfiguration(budget: .tokens(tokens), pressure: pressure))
        } catch {
            problem = error.localizedDescription
        }
    }

    func send(_ text: String) async {
        guard let engine, !isAnswering else { return }
        isAnswering = true
        defer { isAnswering = false }
        messages += [Message(isUser: true, text: text), Message(isUser: false, text: "")]
        do {
            try await engine.answer(text) { frame in
                Task { @MainActor in
                    self.frame = frame
                    self.messages[self.messages.count - 1].text += frame.text
                }
            }
        } catch {
            problem = error.localizedDescription
        }
    }
}
